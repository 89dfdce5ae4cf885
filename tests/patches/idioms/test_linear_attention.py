"""Linear attention and the convolutions in front of it: what counts as a candidate."""

from __future__ import annotations

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.causal_conv import find as causal_conv
from veomni_hook.patches.idioms.gated_delta_rule import find as gated_delta_rule
from veomni_hook.patches.routes.view import ModuleView

COUNTED = """
class Layer:
    def forward(self, q, state=None, **kwargs):
        if state is not None:
            q = causal_conv1d_update(q, state)
            return torch_recurrent_gated_delta_rule(q)
        q = causal_conv1d_fn(q, **kwargs)
        return torch_chunk_gated_delta_rule(q, **kwargs) + torch_chunk_gated_delta_rule(q)

class Older:
    def mix(self, q):
        return self.chunk_gated_delta_rule(self.causal_conv1d_fn(q))

class PerChannel:
    def forward(self, q):
        return chunk_kimi_delta_attention(q)

class Decoding:
    def forward(self, q):
        return fused_recurrent_gated_delta_rule(self.causal_conv1d_update(q))
"""


def test_calls_for_whole_sequences_count_once_a_method() -> None:
    view = ModuleView(Document(COUNTED))
    assert [(each.target, each.lineno) for each in gated_delta_rule.find(view)] == [
        ("Layer.forward", 8),
        ("Older.mix", 12),
        ("PerChannel.forward", 16),
    ]
    assert [(each.target, each.lineno) for each in causal_conv.find(view)] == [
        ("Layer.forward", 7),
        ("Older.mix", 12),
    ]

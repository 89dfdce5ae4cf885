"""Make routers return their logits instead of probabilities.

In transformers 5.2, the routers of ten families replace their logits with the softmax of the logits, and the
load-balancing loss applies softmax again: its gradient is a fraction of the correct value. Since 5.9 the
logits are returned, and this fix does not apply. Weights and indices of experts do not change. The router's
own route yields to this fix, so its few operations run as upstream code.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.models.[fmoq]*.modeling_*",
    description="routers return raw logits, as from transformers 5.9 on",
)

# Those of transformers 5.2: of Qwen2-MoE and others, of Qwen3-VL-MoE and others, of Mixtral and MiniMax.
_BODIES = ["b20298ff084d85f9", "2ad728d8bd234b3d", "c6e4cd1f954a2240"]

config.rewrite(
    "*Router.forward",
    pattern="router_logits = torch.nn.functional.softmax({logits}, **{options})",
    replacement="""
    veomni_raw_logits = {logits}
    router_logits = torch.nn.functional.softmax(veomni_raw_logits, **{options})
    """,
    fingerprints=_BODIES,
    description="keep the logits",
)
config.rewrite(
    "*Router.forward",
    pattern="return router_logits, {scores}, {indices}",
    replacement="return veomni_raw_logits, {scores}, {indices}",
    fingerprints=_BODIES,
    description="return them",
)

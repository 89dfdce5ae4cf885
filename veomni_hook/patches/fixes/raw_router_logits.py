"""Routers return the logits that they are named for, not the probabilities made of them.

In transformers 5.2 ten families' routers put the softmax of their logits in the place of the logits, and
the load-balancing loss takes the softmax of that once more: its gradient is a fraction of what it should
be. From 5.9 on the logits are returned, and nothing here applies. Weights and indices of experts stay what
they are. The router's own route gives way to this, so its few operations are upstream's.
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

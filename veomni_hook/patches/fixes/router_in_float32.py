"""Make routers compute their logits in float32, also under autocast.

A rounding in 16 bits can choose other experts, so that an engine that generates and the model that is
trained on its tokens disagree. Many routers of upstream convert both operands to float32, which autocast
undoes. Routes of routers stay.
"""

# The helper is text for other modules, whose names it uses.
# ruff: noqa: F821
# mypy: disable-error-code="name-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.models.*.modeling_*",
    description="routers compute their logits in float32",
)


@config.add_helper
def veomni_float32_linear(x, weight):
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight.float())


config.rewrite(
    "*Router.forward",
    pattern="F.linear({x}, {weight})",
    replacement="veomni_float32_linear({x}, {weight})",
    matches=None,
    description="a projection in float32 without autocast",
)

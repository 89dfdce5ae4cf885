"""Apply all idioms to one module: every site, routed or not."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from veomni_hook.errors import IdiomError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.routes.settle import settled
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

__all__ = ["IDIOMS", "idioms", "recognise"]

#: Modules below this package, in the order of listings; each has ``OP``, ``CANDIDATES`` and ``find``.
IDIOMS = (
    "rms_norm.find",
    "add_rms_norm.find",
    "layer_norm.find",
    "add_layer_norm.find",
    "nn_layer_norm.find",
    "rotary.find",
    "qk_norm_rotary.find",
    "gated_mlp.find",
    "low_rank_linear.find",
    "attention.find",
    "attention.implementation",
    "attention.window",
    "moe_experts.find",
    "moe_experts.implementation",
    "moe_experts.checkpoints",
    "moe_router.find",
    "load_balancing_loss.find",
    "linear_cross_entropy.find",
    "linear_cross_entropy.sequence_classification",
    "causal_mask.find",
)


@cache
def idioms() -> tuple[ModuleType, ...]:
    """The idiom modules."""
    return tuple(import_module(f"veomni_hook.patches.idioms.{name}") for name in IDIOMS)


def recognise(document: Document) -> list[Site]:
    """Every site of a module, idiom by idiom, in source order.

    Raises:
        IdiomError: an idiom fails on the module.
    """
    view = ModuleView(document)
    sites: list[Site] = []
    for idiom in idioms():
        try:
            sites += settled(view, view.sites(idiom.find))
        except Exception as error:
            raise IdiomError(
                f"the idiom {idiom.__name__} fails on this module: {type(error).__name__}: {error}",
                where=document.module,
                fix="report this as a defect of veomni-hook",
            ) from error
    return sites

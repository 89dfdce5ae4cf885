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

__all__ = ["IDIOMS", "LAYER_LOOPS", "every_idiom", "idioms", "recognise"]

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
    "varlen_attention.find",
    "moe_experts.find",
    "moe_experts.implementation",
    "moe_experts.checkpoints",
    "moe_router.find",
    "load_balancing_loss.find",
    "linear_cross_entropy.find",
    "linear_cross_entropy.sequence_classification",
    "causal_mask.find",
    "host_metadata.find",
    "host_metadata.masks",
    "absent_modality.find",
)

#: The idiom that applies only where processes share sequences: it asks for no kernel.
LAYER_LOOPS = "layer_loop.find"


@cache
def idioms() -> tuple[ModuleType, ...]:
    """The idiom modules."""
    return tuple(import_module(f"veomni_hook.patches.idioms.{name}") for name in IDIOMS)


def every_idiom() -> tuple[ModuleType, ...]:
    """The idiom modules, with that of layer loops."""
    return (*idioms(), import_module(f"veomni_hook.patches.idioms.{LAYER_LOOPS}"))


def recognise(document: Document, *, layer_loops: bool = False) -> list[Site]:
    """Every site of a module, idiom by idiom, in source order.

    Args:
        document: the module.
        layer_loops: also the loops over layers, which change only where processes share sequences.

    Raises:
        IdiomError: an idiom fails on the module.
    """
    view = ModuleView(document)
    sites: list[Site] = []
    for idiom in every_idiom() if layer_loops else idioms():
        try:
            sites += settled(view, view.sites(idiom.find))
        except Exception as error:
            raise IdiomError(
                f"the idiom {idiom.__name__} fails on this module: {type(error).__name__}: {error}",
                where=document.module,
                fix="report this as a defect of veomni-hook",
            ) from error
    return sites

"""Apply all idioms to one module: every site, routed or not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from importlib import import_module
from types import ModuleType

from veomni_hook.errors import IdiomError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.tree import forget_walks
from veomni_hook.patches.routes.reliance import settled
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

__all__ = ["IDIOMS", "LAYER_LOOPS", "OPTIONAL", "SPEECH", "asked", "every_idiom", "idioms", "recognise"]

#: Modules below this package, in the order of listings; each has ``OP``, ``CANDIDATES`` and ``find``.
IDIOMS = (
    "rms_norm.find",
    "add_rms_norm.find",
    "layer_norm.find",
    "add_layer_norm.find",
    "nn_layer_norm.find",
    "rotary.find",
    "qk_norm_rotary.find",
    "hyper_connection.find",
    "hyper_connection.mixed",
    "gated_mlp.find",
    "low_rank_linear.find",
    "row_merge.find",
    "row_merge.added",
    "row_merge.joined",
    "count_check.find",
    "patch_projection.find",
    "attention.find",
    "attention.implementation",
    "attention.window",
    "varlen_attention.find",
    "gated_delta_rule.find",
    "causal_conv.find",
    "log_decay.find",
    "index_scores.find",
    "sample_boundaries.find",
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

#: The idiom that applies only where processes share sequences.
LAYER_LOOPS = "layer_loop.find"
#: The idiom that applies only where the parts of a model that make speech are left out.
SPEECH = "speech.find"
#: The idioms that apply only with a setting; they ask for no kernel.
OPTIONAL = (LAYER_LOOPS, SPEECH)


@cache
def idioms() -> tuple[ModuleType, ...]:
    """The idiom modules."""
    return _imported(IDIOMS)


def every_idiom() -> tuple[ModuleType, ...]:
    """The idiom modules, with the optional ones."""
    return asked(OPTIONAL)


def asked(optional: Collection[str]) -> tuple[ModuleType, ...]:
    """The idiom modules, with these of the optional ones."""
    return (*idioms(), *_imported(name for name in OPTIONAL if name in optional))


def _imported(names: Iterable[str]) -> tuple[ModuleType, ...]:
    return tuple(import_module(f"veomni_hook.patches.idioms.{name}") for name in names)


def recognise(document: Document, *, optional: Collection[str] = ()) -> list[Site]:
    """Every site of a module, idiom by idiom, in source order.

    Args:
        document: the module.
        optional: the idioms to ask of those that apply only with a setting (`OPTIONAL`).

    Raises:
        IdiomError: an idiom fails on the module.
    """
    view = ModuleView(document)
    sites: list[Site] = []
    for idiom in asked(optional):
        try:
            sites += settled(view, view.sites(idiom.find))
        except Exception as error:
            what = f"the idiom {idiom.__name__} fails on this module: {type(error).__name__}: {error}"
            fix = "report this as a defect of veomni-hook"
            raise IdiomError(what, where=document.module, fix=fix) from error
    forget_walks()
    return sites

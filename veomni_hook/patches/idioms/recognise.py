"""Apply all idioms to one module: every site, routed or not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module
from types import ModuleType

from veomni_hook.errors import IdiomError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.tree import forget_walks
from veomni_hook.patches.routes.view import ModuleView, settled
from veomni_hook.patches.site import Site

__all__ = ["IDIOMS", "LAYER_LOOPS", "OPTIONAL", "SPEECH", "asked", "every_idiom", "idioms", "recognise"]

#: Modules below this package, in the order of listings; each has ``OP``, ``CANDIDATES`` and ``find``. All
#: words of one alternative are in each text in which it finds something; an idiom without words may in any.
IDIOMS = {
    "rms_norm": "RMSNorm | mean( rsqrt( | mean( pow(",
    "add_rms_norm": "RMSNorm | mean( rsqrt( | mean( pow(",
    "layer_norm": "LayerNorm",
    "add_layer_norm": "LayerNorm",
    "nn_layer_norm": "LayerNorm",
    "rotary": "apply | Apply | APPLY",
    "qk_norm_rotary": "apply RMSNorm | apply mean(",
    "hyper_connection.find": "HyperConnection | HyperHead | hc_mult | hc_count",
    "hyper_connection.mixed": "_hc( | hyper_connection(",
    "gated_mlp": "",
    "low_rank_linear": "",
    "row_merge.find": "masked_scatter",
    "row_merge.added": "mask",
    "row_merge.joined": "zeros( .sum()",
    "count_check": "torch_compilable_check | get_placeholder_mask",
    "patch_projection": "Conv",
    "attention.find": "eager_attention_forward sinks | eager_attention_forward softcap",
    "implementations": "_attn_implementation_internal | _experts_implementation_internal",
    "attention.window": "",
    "varlen_attention": "cu_seqlens get_interface",
    "gated_delta_rule": "chunk delta",
    "causal_conv": "causal_conv1d",
    "log_decay": "exp(",
    "index_scores": "matmul( | einsum(",
    "sample_boundaries": "",
    "moe_experts.find": "Experts | NaiveMoe | expert Parameter(",
    "moe_experts.checkpoints": "_load_pretrained_model",
    "moe_router": "topk",
    "load_balancing_loss": "load_balancing_loss",
    "linear_cross_entropy.find": ".loss_function",
    "linear_cross_entropy.sequence_classification": "logits",
    "causal_mask": "is_tracing | is_torchdynamo_exporting",
    "host_metadata.find": "",
    "absent_modality.find": "_features(",
}

#: The idiom that applies only where processes share sequences.
LAYER_LOOPS = "layer_loop.find"
#: The idiom that applies only where the parts of a model that make speech are left out.
SPEECH = "speech"
#: The idioms that apply only with a setting; they ask for no kernel.
OPTIONAL = (LAYER_LOOPS, SPEECH)


def idioms(source: str | None = None) -> tuple[ModuleType, ...]:
    """The idiom modules; of a module's text, those that may find something in it: others are not imported."""

    def may_find(words: str) -> bool:
        alternatives = (one.split() for one in words.split("|"))
        return source is None or any(all(word in source for word in one) for one in alternatives)

    return _imported(name for name, words in IDIOMS.items() if may_find(words))


def every_idiom() -> tuple[ModuleType, ...]:
    """The idiom modules, with the optional ones."""
    return asked(OPTIONAL)


def asked(optional: Collection[str], source: str | None = None) -> tuple[ModuleType, ...]:
    """What `idioms` returns, with these of the optional ones."""
    return (*idioms(source), *_imported(name for name in OPTIONAL if name in optional))


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
    for idiom in asked(optional, document.source):
        try:
            sites += settled(view, view.sites(idiom.find))
        except Exception as error:
            what = f"the idiom {idiom.__name__} fails on this module: {type(error).__name__}: {error}"
            fix = "report this as a defect of veomni-hook"
            raise IdiomError(what, where=document.module, fix=fix) from error
    forget_walks()
    return sites

"""Sizes and sides of what is measured: one file each, with ``problems(device, quick)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from veomni_hook.errors import KernelError

if TYPE_CHECKING:
    from veomni_hook.tools.bench.problem import Problem

__all__ = ["OPS", "checked", "problems"]

OPS = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_gated",
    "rms_norm_rounded",
    "layer_norm",
    "rotary",
    "qk_norm_rotary",
    "attention_sinks",
    "varlen_attention",
    "gated_delta_rule",
    "gated_delta_rule_channels",
    "causal_conv",
    "log_decay",
    "log_decay_channels",
    "hyper_connection",
    "index_scores",
    "gated_mlp",
    "low_rank_linear",
    "row_merge",
    "patch_projection",
    "moe_experts",
    "linear_cross_entropy",
    "linear_cross_entropy_grpo",
    "load_balancing_loss",
    "moe_router",
)


def checked(ops: Sequence[str]) -> Sequence[str]:
    """Return ``ops``; raise KernelError, with those that there are, for one that is not measured."""
    for op in ops:
        if op not in OPS:
            raise KernelError(f"there is no benchmark {op!r}", where="bench", fix=f"ops: {', '.join(OPS)}")
    return ops


def problems(op: str, device: str, *, quick: bool = False) -> Iterable[Problem]:
    """Return the problems of ``op``, each made when it is asked for; the first two where ``quick``."""
    found: Iterable[Problem] = import_module(f"{__name__}.{op}").problems(device, quick=quick)
    return found

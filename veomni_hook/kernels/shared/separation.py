"""What layers need to keep samples apart that share a row, besides kernels: names, and the error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from veomni_hook.errors import SamplesError
from veomni_hook.kernels.shared.hub_functions import is_upstreams, takes
from veomni_hook.kernels.shared.origin import name_of

__all__ = ["given_in", "inseparable", "layer_of", "traced", "with_parameter"]

_GIVEN = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")


def given_in(arguments: Mapping[str, Any]) -> bool:
    """Return whether boundaries of samples are among the arguments of a call."""
    return any(arguments.get(name) is not None for name in _GIVEN)


def traced() -> bool:
    """Return whether this code is being traced, so that values are unknown."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def layer_of(owner: Any) -> str:
    """Return the class of a layer, with its number if it has one."""
    number = getattr(owner, "layer_idx", None)
    return type(owner).__name__ if number is None else f"{type(owner).__name__} (layer {number})"


def inseparable(op: str, layer: str, why: str) -> SamplesError:
    """Return the error for samples that would leak into each other."""
    return SamplesError(
        f"samples share a row, and nothing keeps them apart: {why}",
        where=layer,
        fix=f"let a kernel of {op} run (VEOMNI_KERNELS={op}=torch), or pass one sample a row",
    )


def with_parameter(op: str, owner: Any, function: Any, names: tuple[str, ...], slot: Any) -> str:
    """Return the first of ``names`` that a package's function takes as the boundaries of samples.

    Raises:
        SamplesError: it takes none of them, or no package's function is called.
    """
    outcome = slot.outcome(owner)
    why = "" if outcome is None else f" ({outcome.reason})"
    if is_upstreams(function, owner):
        raise inseparable(op, layer_of(owner), f"upstream's own code runs, which has no boundaries{why}")
    for name in names:
        if takes(function, name):
            return name
    raise inseparable(op, layer_of(owner), f"{name_of(function)} takes no boundaries{why}")

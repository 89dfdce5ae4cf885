"""Decides whether a fused kernel may skip the calls of the norms and the rotary function that it replaces.

Nothing may depend on these calls: no hook, no other ``forward``, no class that a wrapper (FSDP2, a
parametrisation) put in place of the recognised one. The slot has already checked that the code of classes and
functions is the recognised one (`veomni_hook.kernels.slot.skipped`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from veomni_hook.kernels.rotary.called_function import replaced
from veomni_hook.kernels.selection.binding import wanted_by
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.shared.module_calls import call_is_seen
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["chosen_apart", "refuses"]

_PARTS = ("rms_norm", "rotary")


def chosen_apart(owner: object, *operands: object) -> str | None:
    """Return why ``auto`` leaves norms and rotation to their own kernels (selected by name), or None."""
    for part in _PARTS:
        chosen = wanted_by(owner, part)
        if chosen != AUTO:
            return f"{part}={chosen} is chosen, and a fused kernel would bypass it"
    return None


def refuses(owner: object, *operands: Any) -> str | None:
    """Return why this call must run the upstream code, or None.

    Args:
        owner: the attention.
        operands: a tensor from which queries are computed, both norms, the norms' class and the rotary
            function as the modeling code has them now, cos and sin (None if not known yet).
    """
    hidden_states, q_norm, k_norm, norm_class, rotary, tables = operands
    reason = not_plain(hidden_states) or untraceable() or _tables(tables)
    if reason is not None:
        return reason
    return replaced(rotary) or _called(q_norm, norm_class) or _called(k_norm, norm_class)


def _called(norm: nn.Module, norm_class: type[nn.Module]) -> str | None:
    """Return why a norm must be called, or None."""
    if type(norm) is not norm_class:
        return f"a norm is a {type(norm).__name__}, not the recognised {norm_class.__name__}"
    seen = call_is_seen(norm)
    return None if seen is None else f"a norm {seen}"


def _tables(tables: object) -> str | None:
    """Return why cos and sin, if known, are not supported, or None."""
    if tables is None:
        return None
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        return "position embeddings are not a pair of cos and sin"
    reason = not_plain(*tables)
    if reason is not None:
        return reason
    cos, sin = tables
    shape = cos.shape
    if len(shape) != 3 or shape != sin.shape:
        return "cos and sin do not both have the shape [batch, length, width]"
    if cos.requires_grad or sin.requires_grad:
        return "cos or sin requires a gradient"
    return None

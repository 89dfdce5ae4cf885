"""Adapts the operands of rotary call sites to the one function of a fused backend.

A backend has one function ``rotate(form, xs, cos, sin, heads_at)``, which rotates tensors of one dtype by
tables without heads. `kernel` makes of it the function that call sites call. A variant's rule in
`operand_rules` must have accepted the call: unsuitable operands are read out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor

from veomni_hook.kernels.rotary import operand_rules
from veomni_hook.kernels.rotary.forms import Form
from veomni_hook.kernels.rotary.variants import FUSED

__all__ = ["Rotate", "kernel"]

Rotate = Callable[[Form, tuple[Tensor, ...], Tensor, Tensor, int], Sequence[Tensor]]


def _both(
    rotate: Rotate, form: Form, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate query and key by tables that get a heads dimension at ``unsqueeze_dim``."""
    query, key = rotate(form, (q, k), cos, sin, operand_rules.heads_of(q, unsqueeze_dim))
    return query, key


def _one(rotate: Rotate, form: Form, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`_both` for one tensor."""
    return rotate(form, (x,), cos, sin, operand_rules.heads_of(x, unsqueeze_dim))[0]


def _both_broadcast(
    rotate: Rotate, form: Form, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate query and key by tables that broadcast over heads."""
    (cos, at), (sin, _) = operand_rules.without_heads(q, cos), operand_rules.without_heads(q, sin)
    query, key = rotate(form, (q, k), cos, sin, at)
    return query, key


def _one_broadcast(rotate: Rotate, form: Form, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`_both_broadcast` for one tensor."""
    (cos, at), (sin, _) = operand_rules.without_heads(x, cos), operand_rules.without_heads(x, sin)
    return rotate(form, (x,), cos, sin, at)[0]


def _one_heads_last(
    rotate: Rotate, form: Form, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 2
) -> Tensor:
    """`_one`; by default, heads come after positions."""
    return _one(rotate, form, x, cos, sin, unsqueeze_dim)


def _complex(
    rotate: Rotate, form: Form, q: Tensor, k: Tensor, freqs: Tensor, unsqueeze_dim: int = 2
) -> tuple[Tensor, Tensor]:
    """Rotate query and key by ``cos + i sin``, complex64 ``[batch or 1, length, head_dim / 2]``.

    Its parts are copied separately. Upstream may contract a complex product, so float32 bits may differ.
    """
    return _both(rotate, form, q, k, freqs.real, freqs.imag, unsqueeze_dim)


def _complex_moved(
    rotate: Rotate, form: Form, q: Tensor, k: Tensor, freqs: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`_complex`; by default, heads come before positions."""
    return _complex(rotate, form, q, k, freqs, unsqueeze_dim)


def _gathered(
    rotate: Rotate,
    form: Form,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotate by rows of tables ``[positions, head_dim]``, which are copied first."""
    return _both(rotate, form, q, k, cos[position_ids], sin[position_ids], unsqueeze_dim)


def _key_last(
    rotate: Rotate,
    form: Form,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    k: Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotate query and key; without a key, return only the query, not a tuple."""
    if k is None:
        return _one(rotate, form, q, cos, sin, unsqueeze_dim)
    return _both(rotate, form, q, k, cos, sin, unsqueeze_dim)


def _optional_key(
    rotate: Rotate, form: Form, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key; a key of None stays None."""
    if k is None:
        return _one(rotate, form, q, cos, sin, unsqueeze_dim), None
    return _both(rotate, form, q, k, cos, sin, unsqueeze_dim)


_CALLS: Mapping[str, Callable[..., Any]] = {
    "both": _both,
    "one": _one,
    "one_heads_last": _one_heads_last,
    "both_broadcast": _both_broadcast,
    "one_broadcast": _one_broadcast,
    "complex": _complex,
    "complex_moved": _complex_moved,
    "gathered": _gathered,
    "key_last": _key_last,
    "optional_key": _optional_key,
}


@cache
def kernel(rotate: Rotate, variant: str) -> Callable[..., Any]:
    """Return the function with the operands and results of the variant's reference."""
    fused = FUSED[variant]
    return partial(_CALLS[fused.call], rotate, fused.form)

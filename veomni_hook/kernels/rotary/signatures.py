"""What call sites of rotary variants pass, brought to what a fused backend computes.

A backend has one function ``rotate(form, xs, cos, sin, heads_at)``: it turns tensors of one dtype by tables
without heads. Everything here is called with it first, and then as the reference function of the variant is;
the variant's rule in `veomni_hook.kernels.rotary.calls` must have let the call through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from veomni_hook.kernels.rotary import calls
from veomni_hook.kernels.rotary.forms import FORMS, Form

__all__ = [
    "Rotate",
    "both",
    "both_broadcast",
    "complex_pairs",
    "complex_pairs_moved",
    "half_split_gathered",
    "half_split_partial_optional_key",
    "one",
    "one_broadcast",
    "pairs_doubled_single",
    "pairs_to_halves_optional_key",
]

Rotate = Callable[[Form, tuple[Tensor, ...], Tensor, Tensor, int], Sequence[Tensor]]


def both(
    rotate: Rotate, form: Form, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn query and key by tables that get a dimension of heads at ``unsqueeze_dim``."""
    query, key = rotate(form, (q, k), cos, sin, calls.heads_of(q, unsqueeze_dim))
    return query, key


def one(rotate: Rotate, form: Form, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`both` of one tensor."""
    return rotate(form, (x,), cos, sin, calls.heads_of(x, unsqueeze_dim))[0]


def both_broadcast(
    rotate: Rotate, form: Form, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Turn query and key by tables that broadcast over heads."""
    (cos, at), (sin, _) = calls.without_heads(q, cos), calls.without_heads(q, sin)
    query, key = rotate(form, (q, k), cos, sin, at)
    return query, key


def one_broadcast(rotate: Rotate, form: Form, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`both_broadcast` of one tensor."""
    (cos, at), (sin, _) = calls.without_heads(x, cos), calls.without_heads(x, sin)
    return rotate(form, (x,), cos, sin, at)[0]


def pairs_doubled_single(
    rotate: Rotate, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 2
) -> Tensor:
    """`half_width_pairs` of one tensor, whose heads come after its positions unless it is said."""
    return one(rotate, FORMS["half_width_pairs"], x, cos, sin, unsqueeze_dim)


def complex_pairs(
    rotate: Rotate, q: Tensor, k: Tensor, freqs: Tensor, unsqueeze_dim: int = 2
) -> tuple[Tensor, Tensor]:
    """Pairs in float32 by ``cos + i sin``, complex64 ``[batch or 1, length, head_dim / 2]``.

    Its parts are copied apart. A complex product may be contracted upstream, so bits of float32 may differ.
    """
    return both(rotate, FORMS["complex_pairs"], q, k, freqs.real, freqs.imag, unsqueeze_dim)


def complex_pairs_moved(
    rotate: Rotate, q: Tensor, k: Tensor, freqs: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`complex_pairs`, whose heads come before positions unless it is said."""
    return complex_pairs(rotate, q, k, freqs, unsqueeze_dim)


def half_split_gathered(
    rotate: Rotate,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """`half_split` by rows of tables ``[positions, head_dim]``, which are copied first."""
    return both(rotate, FORMS["half_split"], q, k, cos[position_ids], sin[position_ids], unsqueeze_dim)


def half_split_partial_optional_key(
    rotate: Rotate, q: Tensor, cos: Tensor, sin: Tensor, k: Tensor | None = None, unsqueeze_dim: int = 1
) -> Tensor | tuple[Tensor, Tensor]:
    """`half_split_partial`; only the query, and no tuple, where there is no key."""
    form = FORMS["half_split_partial"]
    if k is None:
        return one(rotate, form, q, cos, sin, unsqueeze_dim)
    return both(rotate, form, q, k, cos, sin, unsqueeze_dim)


def pairs_to_halves_optional_key(
    rotate: Rotate, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """`pairs_to_halves`; no key gives none."""
    form = FORMS["pairs_to_halves"]
    if k is None:
        return one(rotate, form, q, cos, sin, unsqueeze_dim), None
    return both(rotate, form, q, k, cos, sin, unsqueeze_dim)

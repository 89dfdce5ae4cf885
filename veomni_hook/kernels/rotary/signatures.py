"""Adapts the operands of rotary call sites to the one function of a fused backend.

A backend has one function ``rotate(form, xs, cos, sin, heads_at)``, which rotates tensors of one dtype by
tables without heads. `variants` builds from it the functions that call sites call. A variant's rule in
`veomni_hook.kernels.rotary.calls` must have accepted the call: unsuitable operands are read out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from veomni_hook.kernels.rotary import calls
from veomni_hook.kernels.rotary.forms import FORMS, Form

__all__ = ["Rotate", "variants"]

Rotate = Callable[[Form, tuple[Tensor, ...], Tensor, Tensor, int], Sequence[Tensor]]


def variants(rotate: Rotate) -> dict[str, Callable[..., Any]]:
    """Return a function for each variant, with the operands and results of its reference function."""
    return {
        "half_split": partial(_both, rotate, FORMS["half_split"]),
        "half_split_cast_out": partial(_both, rotate, FORMS["half_split_cast_out"]),
        "half_split_fp32": partial(_both, rotate, FORMS["half_split_fp32"]),
        "half_split_reversed": partial(_both, rotate, FORMS["half_split_reversed"]),
        "half_split_partial": partial(_both, rotate, FORMS["half_split_partial"]),
        "half_split_single": partial(_one, rotate, FORMS["half_split"]),
        "half_width_halves": partial(_both, rotate, FORMS["half_width_halves"]),
        "half_width_halves_single": partial(_one_broadcast, rotate, FORMS["half_width_halves"]),
        "half_width_pairs": partial(_both, rotate, FORMS["half_width_pairs"]),
        "half_width_pairs_single": partial(_one_broadcast, rotate, FORMS["half_width_pairs"]),
        "pairs": partial(_both, rotate, FORMS["pairs"]),
        "pairs_fp32": partial(_both, rotate, FORMS["pairs_fp32"]),
        "pairs_fp32_broadcast": partial(_both_broadcast, rotate, FORMS["pairs_fp32"]),
        "pairs_partial": partial(_both, rotate, FORMS["pairs_partial"]),
        "pairs_repeated": partial(_both, rotate, FORMS["pairs_repeated"]),
        "pairs_repeated_fp32": partial(_both, rotate, FORMS["pairs_repeated_fp32"]),
        "pairs_partial_repeated": partial(_both, rotate, FORMS["pairs_partial_repeated"]),
        "pairs_trailing_fp32_single": partial(_one, rotate, FORMS["pairs_trailing_fp32"]),
        "pairs_to_halves": partial(_both, rotate, FORMS["pairs_to_halves"]),
        "pairs_to_halves_full_width": partial(_both, rotate, FORMS["pairs_to_halves_full_width"]),
        "pairs_matrix": partial(_both, rotate, FORMS["pairs_matrix"]),
        "complex_pairs": partial(_complex_pairs, rotate),
        "complex_pairs_moved": partial(_complex_pairs_moved, rotate),
        "half_split_gathered": partial(_half_split_gathered, rotate),
        "half_split_partial_optional_key": partial(_half_split_partial_optional_key, rotate),
        "pairs_doubled_single": partial(_pairs_doubled_single, rotate),
        "pairs_to_halves_optional_key": partial(_pairs_to_halves_optional_key, rotate),
    }


def _both(
    rotate: Rotate, form: Form, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate query and key by tables that get a heads dimension at ``unsqueeze_dim``."""
    query, key = rotate(form, (q, k), cos, sin, calls.heads_of(q, unsqueeze_dim))
    return query, key


def _one(rotate: Rotate, form: Form, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`both` for one tensor."""
    return rotate(form, (x,), cos, sin, calls.heads_of(x, unsqueeze_dim))[0]


def _both_broadcast(
    rotate: Rotate, form: Form, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate query and key by tables that broadcast over heads."""
    (cos, at), (sin, _) = calls.without_heads(q, cos), calls.without_heads(q, sin)
    query, key = rotate(form, (q, k), cos, sin, at)
    return query, key


def _one_broadcast(rotate: Rotate, form: Form, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`both_broadcast` for one tensor."""
    (cos, at), (sin, _) = calls.without_heads(x, cos), calls.without_heads(x, sin)
    return rotate(form, (x,), cos, sin, at)[0]


def _pairs_doubled_single(
    rotate: Rotate, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 2
) -> Tensor:
    """`half_width_pairs` for one tensor; by default, heads come after positions."""
    return _one(rotate, FORMS["half_width_pairs"], x, cos, sin, unsqueeze_dim)


def _complex_pairs(
    rotate: Rotate, q: Tensor, k: Tensor, freqs: Tensor, unsqueeze_dim: int = 2
) -> tuple[Tensor, Tensor]:
    """Pairs in float32 by ``cos + i sin``, complex64 ``[batch or 1, length, head_dim / 2]``.

    Its parts are copied separately. Upstream may contract a complex product, so float32 bits may differ.
    """
    return _both(rotate, FORMS["complex_pairs"], q, k, freqs.real, freqs.imag, unsqueeze_dim)


def _complex_pairs_moved(
    rotate: Rotate, q: Tensor, k: Tensor, freqs: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`complex_pairs`; by default, heads come before positions."""
    return _complex_pairs(rotate, q, k, freqs, unsqueeze_dim)


def _half_split_gathered(
    rotate: Rotate,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """`half_split` by rows of tables ``[positions, head_dim]``, which are copied first."""
    return _both(rotate, FORMS["half_split"], q, k, cos[position_ids], sin[position_ids], unsqueeze_dim)


def _half_split_partial_optional_key(
    rotate: Rotate, q: Tensor, cos: Tensor, sin: Tensor, k: Tensor | None = None, unsqueeze_dim: int = 1
) -> Tensor | tuple[Tensor, Tensor]:
    """`half_split_partial`; without a key, returns only the query, not a tuple."""
    form = FORMS["half_split_partial"]
    if k is None:
        return _one(rotate, form, q, cos, sin, unsqueeze_dim)
    return _both(rotate, form, q, k, cos, sin, unsqueeze_dim)


def _pairs_to_halves_optional_key(
    rotate: Rotate, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """`pairs_to_halves`; a key of None stays None."""
    form = FORMS["pairs_to_halves"]
    if k is None:
        return _one(rotate, form, q, cos, sin, unsqueeze_dim), None
    return _both(rotate, form, q, k, cos, sin, unsqueeze_dim)

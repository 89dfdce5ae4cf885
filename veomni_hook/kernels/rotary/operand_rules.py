"""Checks the operands of a fused rotation: shapes, dtypes, tables that broadcast only over heads.

Tensors are ``[batch, heads, length, head_dim]`` or ``[batch, length, heads, head_dim]``, with or without
batch; tables have no heads: ``[batch or 1, length, width]``, with or without batch.

A rule gets all operands of its variant and the upstream function; it returns why this call must run the
upstream code, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.rotary.variants import FUSED
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain, untraceable

__all__ = ["MOST_COLUMNS", "heads_of", "rule", "without_heads"]

#: With a wider head, a program would run out of registers.
MOST_COLUMNS = 1024
_INTEGERS = frozenset((torch.int64, torch.int32))


def heads_of(x: torch.Tensor, unsqueeze_dim: int) -> int:
    """The dimension of heads in ``x``, for tables that get one by ``unsqueeze_dim``."""
    return unsqueeze_dim % x.ndim


def without_heads(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A table that broadcasts to ``x``, without its heads dimension, and that dimension's index or -1."""
    if x.ndim != 4 or not 2 <= table.ndim <= 4:
        return table, -1
    while table.ndim < 4:
        table = table.unsqueeze(0)
    for at in (1, 2):
        if table.shape[at] == 1 and table.shape[3 - at] == x.shape[3 - at]:
            return table.select(at, 0), at
    return table, -1


class _Reach(NamedTuple):
    """The rotated columns: ``ratio`` per table column; ``whole``: the tables must cover all of head_dim."""

    ratio: int = 1
    whole: bool = True


def _placed(reach: _Reach, owner: object, *operands: Any) -> str | None:
    *xs, cos, sin, place, _ = operands
    return _unfit(cos, sin, *xs) or _misplaced(reach, cos.shape, place, *xs)


def _broadcast(reach: _Reach, owner: object, *operands: Any) -> str | None:
    *xs, cos, sin, _ = operands
    reason = _unfit(cos, sin, *xs)
    if reason is not None:
        return reason
    table, heads_at = without_heads(xs[0], cos)
    if heads_at < 0:
        return "cos and sin do not broadcast over exactly the heads"
    return _misfit(reach, table.shape, heads_at, *xs)


def _optional_key(reach: _Reach, owner: object, *operands: Any) -> str | None:
    q, k, *others = operands
    xs = (q,) if k is None else (q, k)
    return _placed(reach, owner, *xs, *others)


def _key_last(reach: _Reach, owner: object, *operands: Any) -> str | None:
    q, cos, sin, k, *others = operands
    return _optional_key(reach, owner, q, k, cos, sin, *others)


def _complex(reach: _Reach, owner: object, *operands: Any) -> str | None:
    """`_placed` with cos and sin as one complex table."""
    q, k, freqs, place, _ = operands
    reason = not_plain(freqs)
    if reason is not None:
        return reason
    if freqs.dtype is not torch.complex64:
        return f"cos and sin have dtype {freqs.dtype}, not complex64"
    return _placed(reach, owner, q, k, freqs.real, freqs.imag, place, None)


def _gathered(reach: _Reach, owner: object, *operands: Any) -> str | None:
    """`_placed` with tables ``[positions, head_dim]`` and row indices."""
    q, k, cos, sin, position_ids, place, _ = operands
    reason = _unfit(cos, sin, q, k) or not_plain(position_ids)
    if reason is not None:
        return reason
    if position_ids.dtype not in _INTEGERS or cos.ndim != 2:
        return "positions are not integers, or cos and sin do not have two dimensions"
    return _misplaced(reach, (*position_ids.shape, cos.shape[-1]), place, q, k)


_RULES: Mapping[str, Callable[..., str | None]] = {
    "both": _placed,
    "one": _placed,
    "one_heads_last": _placed,
    "both_broadcast": _broadcast,
    "one_broadcast": _broadcast,
    "complex": _complex,
    "complex_moved": _complex,
    "gathered": _gathered,
    "key_last": _key_last,
    "optional_key": _optional_key,
}


@cache
def rule(variant: str) -> Callable[..., str | None]:
    """Return the rule for calls of a variant."""
    fused = FUSED[variant]
    return partial(_RULES[fused.call], _Reach(fused.form.ratio, whole=fused.form.reach == "full"))


def _unfit(cos: Any, sin: Any, *xs: Any) -> str | None:
    reason = not_plain(cos, sin, *xs) or untraceable()
    if reason is not None:
        return reason
    dtype, table = xs[0].dtype, cos.dtype
    if dtype not in DTYPES or table not in DTYPES or sin.dtype is not table:
        return f"the kernel does not support {dtype} with cos of {table} and sin of {sin.dtype}"
    if cos.requires_grad or sin.requires_grad or cos.shape != sin.shape:
        return "cos or sin requires a gradient, or they have different shapes"
    for tensor in (cos, sin, *xs):
        if tensor.device != xs[0].device or tensor.layout is not torch.strided:
            return "operands are not strided tensors on one device"
    for x in xs:
        if x.dtype is not dtype or x.ndim != xs[0].ndim or x.ndim not in (3, 4):
            return "query and key have different dtypes, or do not have three or four dimensions"
    return None


def _misplaced(reach: _Reach, table: tuple[int, ...], place: object, *xs: torch.Tensor) -> str | None:
    dimensions = xs[0].ndim
    if type(place) is not int or not -dimensions <= place < dimensions:
        return f"unsqueeze_dim is {place!r}, which is out of range"
    heads_at = heads_of(xs[0], place)
    if heads_at not in (dimensions - 3, dimensions - 2):
        return f"unsqueeze_dim is {place!r}, which is not the dimension of the heads"
    if len(table) != dimensions - 1:
        return "cos and sin do not have exactly one dimension less than the query"
    return _misfit(reach, table, heads_at, *xs)


def _misfit(reach: _Reach, table: tuple[int, ...], heads_at: int, *xs: torch.Tensor) -> str | None:
    """Return why tables ``[(batch or 1,) length, width]`` do not cover ``xs``, or None."""
    rotated, length_at = table[-1] * reach.ratio, 2 * xs[0].ndim - 5 - heads_at
    if rotated % 2 or not rotated:
        return "cos and sin do not rotate an even number of columns"
    for x in xs:
        shape = x.shape
        if shape[length_at] != table[-2] or (len(shape) == 4 and table[0] not in (1, shape[0])):
            return "cos and sin do not match the positions or the batch of query or key"
        if rotated > shape[-1] or (reach.whole and rotated < shape[-1]):
            return "cos and sin do not match the columns of query or key"
        if shape[-1] > MOST_COLUMNS:
            return f"the kernel supports a head_dim of at most {MOST_COLUMNS}"
    return None

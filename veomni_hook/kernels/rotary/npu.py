"""Rotary embedding with ``npu_rotary_mul``: one operator call per tensor, in forward and in backward.

The operator computes ``x * r1 + turn(x) * r2`` over the whole last dimension, on halves or on pairs. So

    tables    are expanded to full width, in the order of ``turn``; the other direction uses ``-r2``
    columns   that are not rotated are concatenated to the result
    pairs     that become halves are moved first
    layouts   of x become ``[batch, length, heads, head_dim]`` with tables ``[1, length, 1, head_dim]``, or,
              with tables per sequence, one long sequence of all rows: both of its modes support these
    backward  is the rotation of the gradient by ``r1`` and ``-r2`` with the members of couples exchanged

The operator documents no rounding of products and sum; upstream rounds each. It documents tables from -1 to
1; their values are not checked, and YaRN scales them by slightly more.
Shapes: as in `veomni_hook.kernels.rotary.operand_rules`. Saved: the tables at full width. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from veomni_hook.kernels.rotary import operand_rules, signatures
from veomni_hook.kernels.rotary.forms import COUPLE, Form
from veomni_hook.kernels.shared import ascend
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operators import operator

__all__ = ["kernel", "rule"]

# Documented exclusive limits of the operator: heads, or batches times heads, and head width.
_MOST_HEADS, _MOST_COLUMNS = 1000, 896


@operator(lambda x, cos, sin, mode: x.new_empty(x.shape))
def _npu_rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    y: Tensor = ascend.call("npu_rotary_mul", x, cos, sin, mode)
    return y


def _exchanged(table: Tensor, mode: str) -> Tensor:
    """Exchange the numbers of each couple's members."""
    if mode == "half":
        return torch.cat(table.chunk(2, dim=-1)[::-1], dim=-1)
    return table.reshape(*table.shape[:-1], -1, 2).flip(-1).flatten(-2)


def _turned_back(
    saved: Sequence[Tensor], rest: Sequence[str], _: object, dy: Tensor
) -> tuple[Tensor, None, None]:
    (_x, cos, sin), (mode,) = saved, rest
    return _rotated(dy.contiguous(), cos, -_exchanged(sin, mode), mode), None, None


#: Takes x, cos, sin and the mode.
_rotated: Callable[..., Tensor] = differentiable(_npu_rotary, _turned_back, None, tensors=3, unread=1)


def _full(form: Form, table: Tensor, mode: str) -> Tensor:
    """A table with a number for each rotated column, in the order of `turn`."""
    couples = table.shape[-1] * form.ratio // 2
    if form.table == COUPLE:
        table = table[..., :couples]
        return torch.cat((table, table), dim=-1) if mode == "half" else table.repeat_interleave(2, dim=-1)
    return table  # already in halves or pairs as rotated, also for `pairs_to_halves_full_width`


def _turned(form: Form, x: Tensor, cos: Tensor, sin: Tensor, heads_at: int) -> Tensor:
    """Rotate ``x`` by tables without heads."""
    dtype = torch.float32 if form.wide else torch.promote_types(x.dtype, cos.dtype)
    out = x.dtype if form.cast else dtype
    rotated = cos.shape[-1] * form.ratio
    offset = x.shape[-1] - rotated if form.reach == "trailing" else 0
    part = x.narrow(-1, offset, rotated).to(dtype)
    mode = "interleave" if form.pairs_in and form.pairs_out else "half"
    if form.pairs_in and not form.pairs_out:
        part = part.reshape(*part.shape[:-1], rotated // 2, 2).transpose(-1, -2).flatten(-2)
    cos, sin = (_full(form, table.to(dtype), mode) for table in (cos, sin))
    turned = _by_operator(part, cos, -sin if form.backwards else sin, heads_at, mode).to(out)
    if rotated == x.shape[-1]:
        return turned
    before, after = x.narrow(-1, 0, offset), x.narrow(-1, offset + rotated, x.shape[-1] - offset - rotated)
    return torch.cat((before.to(out), turned, after.to(out)), dim=-1)


def _by_operator(x: Tensor, cos: Tensor, sin: Tensor, heads_at: int, mode: str) -> Tensor:
    if not x.numel():
        return x * 1
    heads_first = heads_at == x.ndim - 3
    rows = x.transpose(-3, -2) if heads_first else x
    shape = rows.shape
    *batch, length, heads, columns = shape
    if heads >= _MOST_HEADS:
        parts = torch.split(rows, _MOST_HEADS - 1, dim=-2)
        turned = torch.cat([_by_operator(part, cos, sin, x.ndim - 2, mode) for part in parts], dim=-2)
        return turned.transpose(-3, -2) if heads_first else turned
    tables = [table if table.ndim == 3 else table[None] for table in (cos, sin)]
    number = batch[0] if batch else 1
    if tables[0].shape[0] > 1 or number * heads >= _MOST_HEADS:
        tables = [table.expand(number, length, columns).reshape(1, -1, columns) for table in tables]
        number, length = 1, number * length
    cos, sin = (table.unsqueeze(2).contiguous() for table in tables)
    rows = rows.reshape(number, length, heads, columns).contiguous()
    turned = _rotated(rows, cos, sin, mode).view(shape)
    return turned.transpose(-3, -2) if heads_first else turned


def _rotate(form: Form, xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, heads_at: int) -> list[Tensor]:
    return [_turned(form, x, cos, sin, heads_at) for x in xs]


kernel = partial(signatures.kernel, _rotate)


def _within(rule: Callable[..., str | None], owner: object, *operands: Any) -> str | None:
    """A rule of `veomni_hook.kernels.rotary.operand_rules`, plus the operator's limits."""
    reason = rule(owner, *operands)
    if reason is None and operands[0].shape[-1] >= _MOST_COLUMNS:
        return f"npu_rotary_mul supports a head_dim of less than {_MOST_COLUMNS}"
    return reason


@cache
def rule(variant: str) -> Callable[..., str | None]:
    """Return the rule for calls of a variant."""
    return partial(_within, operand_rules.rule(variant))

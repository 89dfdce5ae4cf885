"""Attention with sinks under any dense mask, in Triton: no score is stored, no key is repeated for its heads.

Made for DeepSeek-V4: 64 heads share one key, which is the value, too, and the mask holds a causal window
beside chosen positions. `veomni_hook.kernels.attention.tiles_device` has the formulas. The mask is read for
what it adds; tiles of keys that it hides from a block of queries are skipped.

Shapes: query ``[batch, heads, queries, width]``, key and value ``[batch, heads / groups, keys, width]`` in
one dtype of float32, bfloat16, float16, strided; values may be of another width; mask
``[1 or batch, 1, queries, keys]``, floating; sinks ``[heads]``. Saved: the operands, the output and a float32
number for each query and head. Mutates: nothing. Deterministic: sums have a fixed order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.attention.calls import dtype_of, refuses_call
from veomni_hook.kernels.attention.masks import in_order
from veomni_hook.kernels.shared.autograd import applied, backward_once
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power, room
from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.kernels.shared.operators import define_op

__all__ = ["loses", "refuses", "with_sinks"]

Tensor = torch.Tensor
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NARROWEST, _WIDEST = 16, 512
#: Queries of a call from which on ``auto`` takes it: fewer were not measured.
_SHORTEST = 1024
#: Rows (queries times heads) and keys of a tile, by preference: the first that fit into shared memory.
_TILES = ((64, 64), (64, 32), (32, 32), (16, 16))
#: Programs for each multiprocessor that the backward of keys is to have, and the most parts of its sums.
_PROGRAMS, _MOST_PARTS = 2, 16


def with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    module: Any,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[Tensor, None]:
    """Return attention with the sinks ``module.sinks [heads]``; see `reference` for the operands."""
    dtype = dtype_of(query)
    keys = key.to(dtype)
    values = None if value is key else value.to(dtype)
    out, _ = _apply(query.to(dtype), keys, values, attention_mask[:, 0], module.sinks, float(scaling))
    return out, None


def refuses(  # noqa: PLR0913, PLR0917 - the operands of the op
    owner: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    module: Any,
    scaling: Any,
    dropout: Any,
    *others: Any,
) -> str | None:
    """Return why this call must run the upstream code, or None."""
    if (reason := refuses_call(owner, query, key, value, dropout, _DTYPES)) is not None:
        return reason
    widths = query.shape[-1], value.shape[-1]
    if key.shape[-1] != widths[0] or max(widths) > _WIDEST:
        return f"head sizes are {widths[0]}, {key.shape[-1]} and {widths[1]}; at most {_WIDEST}"
    if attention_mask is None or (reason := not_plain(attention_mask)) is not None:
        return reason or "there is no attention mask"
    shape = query.shape[2], key.shape[2]
    fits = attention_mask.ndim == 4 and attention_mask.shape[1:] == (1, *shape)
    if not fits or attention_mask.shape[0] not in {1, query.shape[0]}:
        return f"the attention mask is {tuple(attention_mask.shape)}, not {(query.shape[0], 1, *shape)}"
    if attention_mask.device != query.device or not attention_mask.is_floating_point():
        return f"the attention mask is {attention_mask.dtype} on {attention_mask.device}"
    return "the attention mask wants a gradient" if attention_mask.requires_grad else None


def loses(owner: Any, query: Any, key: Any, *others: Any) -> str | None:
    """Return why ``auto`` leaves this call to the upstream code, or None."""
    if query.shape[2] < _SHORTEST:
        return f"fewer than {_SHORTEST} queries: not measured to be faster"
    if key.shape[1] > 1:
        return "heads have keys of their own: not measured to be faster"
    if dtype_of(query) is torch.float32:
        return "the attention is in float32: not measured to be faster"
    return None


class _Tile(NamedTuple):
    """Sizes of tiles, and what launches need of the widths."""

    queries: int
    heads: int
    keys: int
    constants: tuple[Any, ...]
    warps: int


@lru_cache(maxsize=LAUNCHES)
def _tile(
    device: torch.device, itemsize: int, heads: int, kv: int, widths: tuple[int, int], *, shared: bool
) -> _Tile:
    group = heads // kv
    columns, value_columns = (max(_NARROWEST, power(width)) for width in widths)
    across = columns + value_columns
    for rows, keys in _TILES:
        # A backward has query and gradient of the output, keys and values, and two tiles of scores.
        held = rows * across + keys * (columns if shared else across) + 2 * rows * keys
        if held * itemsize <= room(device)[1]:
            break
    own = min(power(group), rows)
    constants = kv, group, widths[0], columns, widths[1], value_columns, shared, rows // own, own, keys
    return _Tile(rows // own, own, keys, constants, 8 if max(columns, value_columns) > 128 else 4)


@lru_cache(maxsize=LAUNCHES)
def _launch(
    kind: str, device: torch.device, dtypes: tuple[Any, ...], numbers: Any, tile: _Tile, *more: int
) -> Launch:
    """A launch; ``numbers`` are strides and the scale, on which Triton specialises."""
    from veomni_hook.kernels.attention import tiles_device  # Triton, which not every machine has

    tensors = {"forward": 9, "backward_query": 11, "backward_keys": 10}[kind]
    function = getattr(tiles_device, kind)
    return Launch(function, tensors, *tile.constants, *more, num_warps=tile.warps, num_stages=1)


def _seen(mask: Tensor, tile: _Tile) -> Tensor:
    """Return ``[batch, blocks of queries, tiles of keys]``: whether any query of a block sees any key."""
    queries, keys = mask.shape[1:]
    visible = mask > torch.finfo(mask.dtype).min
    visible = functional.pad(visible, (0, -keys % tile.keys, 0, -queries % tile.queries))
    blocks = visible.shape[1] // tile.queries
    return visible.view(len(mask), blocks, tile.queries, -1, tile.keys).any(4).any(2)


def _strides(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seen: Tensor) -> tuple[int, ...]:
    """Strides that all kernels take; of a mask for all rows of the batch, that of the batch is 0."""
    one = len(mask) == 1
    return (
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        0 if one else mask.stride(0),
        *mask.stride()[1:],
        0 if one else seen.shape[1] * seen.shape[2],
        0 if one else seen.shape[1],
    )


def _columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward_op(
    query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    query, key = _columns(query), _columns(key)
    own_value = key if value is None else _columns(value)
    out, lse = _forward_fake(query, key, value, mask, sinks, scale)
    if not out.numel():
        return out, lse
    (batch, heads, queries, width), (kv, keys) = query.shape, key.shape[1:3]
    widths = width, own_value.shape[-1]
    tile = _tile(query.device, query.element_size(), heads, kv, widths, shared=value is None)
    seen = _seen(mask, tile)
    counts, tiles = in_order(seen)
    numbers = *_strides(query, key, own_value, mask, seen), scale
    dtypes = query.dtype, mask.dtype, sinks.dtype
    launch = _launch("forward", query.device, dtypes, numbers, tile)
    grid = seen.shape[1], cdiv(heads // kv, tile.heads), batch * kv
    tensors = query, key, own_value, mask, sinks.contiguous(), tiles, counts, out, lse
    launch(grid, *tensors, queries, keys, *numbers)
    return out, lse


def _backward_op(  # noqa: PLR0913, PLR0917 - the op's schema
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, dout = _columns(query), _columns(key), dout.contiguous()
    own_value = key if value is None else _columns(value)
    (batch, heads, queries, width), (kv, keys) = query.shape, key.shape[1:3]
    widths = width, own_value.shape[-1]
    dquery, dkey, dvalue, delta = _backward_fake(query, key, value, mask, out, lse, dout, scale)
    if not (out.numel() and key.numel()):
        return dquery.zero_(), dkey.zero_(), dvalue.zero_(), delta.zero_()
    tile = _tile(query.device, query.element_size(), heads, kv, widths, shared=value is None)
    seen, chunks = _seen(mask, tile), cdiv(heads // kv, tile.heads)
    counts, tiles = in_order(seen)
    strides = _strides(query, key, own_value, mask, seen)
    numbers, dtypes = (*strides, scale), (query.dtype, mask.dtype)
    launch = _launch("backward_query", query.device, dtypes, numbers, tile)
    tensors: tuple[Tensor, ...] = query, key, own_value, mask, out, dout, lse, tiles, counts, dquery, delta
    launch((seen.shape[1], chunks, batch * kv), *tensors, queries, keys, *numbers)

    counts, blocks = in_order(seen.mT.contiguous())
    numbers = batch, *strides[:-1], 0 if len(mask) == 1 else seen.shape[2], scale
    programs = seen.shape[2] * chunks * batch * kv
    parts = min(_MOST_PARTS, max(1, cdiv(_PROGRAMS * room(query.device)[0], programs)))

    def of_keys(width: int, *, of_values: bool) -> Tensor:
        sums = key.new_empty(parts * chunks, batch, kv, keys, width, dtype=torch.float32)
        launch = _launch("backward_keys", query.device, dtypes, numbers, tile, parts, of_values)
        tensors = query, key, own_value, mask, dout, lse, delta, blocks, counts, sums
        launch((seen.shape[2], parts * chunks, batch * kv), *tensors, queries, keys, *numbers)
        return sums.sum(0)

    of_key, of_value = of_keys(width, of_values=False), of_keys(widths[1], of_values=True)
    if value is None:
        dkey.copy_(of_key.add_(of_value))
    else:
        dkey.copy_(of_key)
        dvalue.copy_(of_value)
    return dquery, dkey, dvalue, delta


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    width = (key if value is None else value).shape[-1]
    lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
    return query.new_empty(batch, queries, heads, width), lse


def _backward_fake(  # noqa: PLR0913, PLR0917 - the op's schema
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dvalue = key.new_empty(0) if value is None else value.new_empty(value.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), dvalue, lse.new_empty(lse.shape)


_FORWARD = define_op(
    "attention_tiles(Tensor query, Tensor key, Tensor? value, Tensor mask, Tensor sinks, float scale)"
    " -> (Tensor, Tensor)",
    _forward_op,
    _forward_fake,
)
_BACKWARD = define_op(
    "attention_tiles_backward(Tensor query, Tensor key, Tensor? value, Tensor mask, Tensor out, Tensor lse,"
    " Tensor dout, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor, sinks: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _FORWARD(query, key, value, mask, sinks, scale)
        ctx.save_for_backward(query, key, value, mask, sinks, out, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @backward_once
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, out, lse = ctx.saved_tensors
        dquery, dkey, dvalue, delta = _BACKWARD(query, key, value, mask, out, lse, dout, ctx.scale)
        share = (sinks.float()[:, None] - lse).exp_()
        dsinks = -share.mul_(delta).sum((0, 2)).to(sinks.dtype)
        found = dquery, dkey, None if value is None else dvalue, None, dsinks
        wanted = zip(found, ctx.needs_input_grad, strict=False)
        return *(each if want else None for each, want in wanted), None


_apply = applied(_Attention)

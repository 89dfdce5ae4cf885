"""Attention with sinks under any dense mask, in Triton: no score is stored, no key is repeated for its heads.

Made for DeepSeek-V4: 64 heads share one key, which is the value, too, and the mask holds a causal window
beside chosen positions. `tiles_device` has the formulas. The mask is read for what it adds; tiles of keys
that it hides from all of a block of queries are skipped.

Shapes: query ``[batch, heads, queries, width]``, key and value ``[batch, heads / groups, keys, width]`` in
one dtype of float32, bfloat16, float16, strided; values may be of another width; mask
``[1 or batch, 1, queries, keys]``, floating; sinks ``[heads]``. Saved: the operands, the output and a float32
number for each query and head. Mutates: nothing. Deterministic: sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.attention import reference
from veomni_hook.kernels.attention import tiles_device as kernels
from veomni_hook.kernels.attention.calls import refuses_call
from veomni_hook.kernels.attention.masks import in_order
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, cdiv, generation, launch_of, power, room
from veomni_hook.kernels.shared.operand_checks import dtype_of, not_plain
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import dense_rows

__all__ = ["loses", "refuses", "with_sinks"]

Tensor = torch.Tensor
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NARROWEST, _WIDEST = 16, 512
#: Queries of a call from which on ``auto`` takes it: fewer were not measured.
_SHORTEST = 1024
_BLACKWELL = 10
#: Rows (queries times heads) and keys of a tile, and how many tiles of the loop are in flight, by preference:
#: the first that fit into shared memory. "backward": both kernels where keys are not the values.
_TILES = {
    "forward": ((64, 64, 2), (64, 32, 2), (32, 32, 2), (16, 16, 1)),
    "backward": ((64, 64, 1), (64, 32, 1), (32, 32, 1), (16, 16, 1)),
    "backward_query": ((64, 32, 2), (32, 32, 2), (16, 16, 1)),
    "backward_keys": ((32, 64, 2), (16, 64, 2), (16, 32, 2), (16, 16, 1)),
}
#: Programs for each multiprocessor that the backward of keys is to have, and the most parts of its sums. With
#: 64 heads, 4,096 positions and 512 chosen keys, 132 multiprocessors are then idle for 5 % of a simulation.
_PROGRAMS, _MOST_PARTS = 7, 16


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
    out = _attention(query.to(dtype), keys, values, attention_mask[:, 0], module.sinks, float(scaling))
    return out, None


def refuses(
    owner: object,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    module: object,
    scaling: object,
    dropout: object,
    *others: object,
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


def loses(owner: object, query: torch.Tensor, key: torch.Tensor, *others: object) -> str | None:
    """Return why ``auto`` leaves this call to the upstream code, or None."""
    if query.shape[2] < _SHORTEST:
        return f"fewer than {_SHORTEST} queries: not measured to be faster"
    if key.shape[1] > 1:
        return "heads have keys of their own: not measured to be faster"
    if dtype_of(query) is torch.float32:
        return "the attention is in float32: not measured to be faster"
    return None


class _Tile(NamedTuple):
    """Queries, heads and keys of a tile, tiles in flight, and warps of a program."""

    queries: int
    heads: int
    keys: int
    stages: int
    warps: int


@lru_cache(maxsize=LAUNCHES)
def _tile(kind: str, device: torch.device, itemsize: int, group: int, *widths: int) -> _Tile:
    """Return the tiles of a kernel; ``widths``: one if keys are the values, else theirs and the values'."""
    columns = [_columns_of(width) for width in widths]
    across = sum(columns)
    for rows, keys, stages in _TILES[kind]:
        # On Blackwell, products end later, and Triton holds a tile more for them.
        in_flight = stages + 1 if stages > 1 and generation(device) == _BLACKWELL else stages
        of_rows, of_keys = rows * across, keys * across
        if kind == "forward":
            of_rows, of_keys = rows * columns[0], in_flight * of_keys
        elif kind == "backward_query":
            of_rows, of_keys = 2 * of_rows, in_flight * of_keys
        elif kind == "backward_keys":
            of_rows = in_flight * 2 * of_rows
        if (of_rows + of_keys + 2 * rows * keys) * itemsize <= room(device)[1]:
            break
    own = min(power(group), rows)
    return _Tile(rows // own, own, keys, stages, 8 if max(columns) > 128 else 4)


def _columns_of(width: int) -> int:
    return max(_NARROWEST, power(width))


class _Kernel(NamedTuple):
    """One of the kernels, for operands of one kind.

    Attributes:
        name: of its function.
        tile: its sizes of tiles.
        constants: what is compiled into it.
    """

    name: str
    tile: _Tile
    constants: tuple[object, ...]


def _kernel(name: str, query: Tensor, key: Tensor, value: Tensor | None) -> _Kernel:
    shared = value is None
    heads, kv, widths = query.shape[1], key.shape[1], [query.shape[3]]
    if value is not None:
        widths.append(value.shape[3])
    kind = name if shared or name == "forward" else "backward"
    tile = _tile(kind, query.device, query.element_size(), heads // kv, *widths)
    sizes = [size for width in (widths * 2)[:2] for size in (width, _columns_of(width))]
    return _Kernel(name, tile, (kv, heads // kv, *sizes, *tile[:4], shared))


def _seen(mask: Tensor, tile: _Tile) -> Tensor:
    """Return ``[batch, blocks of queries, tiles of keys]``: whether any query of a block sees any key."""
    queries, keys = mask.shape[1:]
    visible = mask > torch.finfo(mask.dtype).min
    visible = functional.pad(visible, (0, -keys % tile.keys, 0, -queries % tile.queries))
    blocks = visible.shape[1] // tile.queries
    return visible.view(len(mask), blocks, tile.queries, -1, tile.keys).any(4).any(2)


def _strides(operands: tuple[Tensor, ...], seen: Tensor) -> tuple[int, ...]:
    """Strides of operands, the mask last, and of lists of tiles; 0 for the batch of a mask for all rows."""
    *tensors, mask = operands
    rows = 0 if len(mask) == 1 else 1
    return (
        *(stride for tensor in tensors for stride in tensor.stride()[:3]),
        mask.stride(0) * rows,
        *mask.stride()[1:],
        seen.shape[1] * seen.shape[2] * rows,
        seen.shape[1] * rows,
    )


def _run(
    kernel: _Kernel,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, int],
    numbers: tuple[object, ...],
    *constants: object,
) -> None:
    """Launch a kernel.

    Args:
        kernel: the kernel.
        grid: of the launch.
        tensors: its first arguments.
        sizes: the numbers of queries and keys, on which Triton does not specialise.
        numbers: strides and the scale, on which it does.
        constants: its last ones, after the kernel's.
    """
    launch = launch_of(
        (tensors[0].device, *(tensor.dtype for tensor in tensors), *numbers), getattr(kernels, kernel.name),
        len(tensors), *kernel.constants, *constants, num_warps=kernel.tile.warps,
    )  # fmt: skip
    launch(grid, *tensors, *sizes, *numbers)


def _empty(query: Tensor, key: Tensor, value: Tensor | None, *others: object) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    width = (key if value is None else value).shape[-1]
    lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
    return query.new_empty(batch, queries, heads, width), lse


def _empty_gradients(
    query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor, out: Tensor, lse: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dvalue = key.new_empty(0) if value is None else value.new_empty(value.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), dvalue, lse.new_empty(lse.shape)


@operator(_empty)
def _attention_tiles(
    query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    query, key = dense_rows(query), dense_rows(key)
    out, lse = _empty(query, key, value)
    if not out.numel():
        return out, lse
    (batch, heads, queries, _), (kv, keys) = query.shape, key.shape[1:3]
    kernel = _kernel("forward", query, key, value)
    seen = _seen(mask, kernel.tile)
    counts, tiles = in_order(seen)
    operands = query, key, key if value is None else dense_rows(value), mask
    grid = seen.shape[1], cdiv(heads // kv, kernel.tile.heads), batch * kv
    tensors = *operands, sinks.contiguous(), tiles, counts, out, lse
    _run(kernel, grid, tensors, (queries, keys), (*_strides(operands, seen), scale))
    return out, lse


@operator(_empty_gradients)
def _attention_tiles_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, dout = dense_rows(query), dense_rows(key), dout.contiguous()
    (batch, heads, queries, _), (kv, keys) = query.shape, key.shape[1:3]
    dquery, dkey, dvalue, delta = _empty_gradients(query, key, value, mask, out, lse)
    if not (out.numel() and key.numel()):
        return dquery.zero_(), dkey.zero_(), dvalue.zero_(), delta.zero_()
    operands = query, key, key if value is None else dense_rows(value), mask
    kernel = _kernel("backward_query", query, key, value)
    seen, chunks = _seen(mask, kernel.tile), cdiv(heads // kv, kernel.tile.heads)
    counts, tiles = in_order(seen)
    tensors = *operands, out, dout, lse, tiles, counts, dquery, delta
    grid, sizes = (seen.shape[1], chunks, batch * kv), (queries, keys)
    _run(kernel, grid, tensors, sizes, (*_strides(operands, seen), scale))

    kernel = _kernel("backward_keys", query, key, value)
    seen, chunks = _seen(mask, kernel.tile).mT.contiguous(), cdiv(heads // kv, kernel.tile.heads)
    counts, blocks = in_order(seen)
    # The longest first: a few tiles of chosen keys are seen by nearly all queries.
    order = counts.argsort(dim=-1, descending=True).to(torch.int32)
    programs = seen.shape[1] * chunks * batch * kv
    parts = min(_MOST_PARTS, max(1, cdiv(_PROGRAMS * room(query.device)[0], programs)))
    grid = parts * chunks, seen.shape[1], batch * kv
    numbers = batch, *_strides(operands, seen), scale

    def sums(result: Tensor, *, of_values: bool) -> None:
        partial_sums = result.new_empty(parts * chunks, *result.shape, dtype=torch.float32)
        tensors = *operands, dout, lse, delta, blocks, counts, order, partial_sums
        _run(kernel, grid, tensors, sizes, numbers, parts, of_values)
        result.copy_(partial_sums.sum(0))

    sums(dkey, of_values=False)
    if value is not None:
        sums(dvalue, of_values=True)
    return dquery, dkey, dvalue, delta


def _definition(
    query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor, sinks: Tensor, scale: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    owner = SimpleNamespace(sinks=sinks, num_key_value_groups=groups, training=False)
    operands = query, key, key if value is None else value, mask.unsqueeze(1), owner, scale
    return reference.sinks_float32_softmax(*operands)[0]


def _gradients(
    saved: Sequence[Any], rest: Sequence[float], _: Any, dout: Tensor
) -> tuple[Tensor | None, ...]:
    query, key, value, mask, sinks, out, lse = saved
    dquery, dkey, dvalue, delta = _attention_tiles_backward(query, key, value, mask, out, lse, dout, rest[0])
    share = (sinks.float()[:, None] - lse).exp_()
    dsinks = -share.mul_(delta).sum((0, 2)).to(sinks.dtype)
    return dquery, dkey, None if value is None else dvalue, None, dsinks


_attention: Callable[..., Tensor] = differentiable(
    _attention_tiles, _gradients, _definition, tensors=5, reread=(0,)
)

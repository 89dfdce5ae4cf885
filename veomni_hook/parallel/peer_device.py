"""Device code that moves blocks between GPUs; `veomni_hook.parallel.peer_memory` launches it.

``x`` and ``y`` are ``[SIZE, batch, positions, heads, WIDTH]``, a block for each process, and from each: any
strides, but numbers of a row are neighbours. A row is one head of one position; rows ``first`` to ``end`` of
each block are moved. ``memories`` holds the addresses of the memory of all processes: in each, ``start``
numbers from its beginning, the rows that the ``n``-th process after its own wrote begin ``(n - 1) * room``
numbers further on.
"""

import triton
import triton.language as tl

__all__ = ["read", "write"]

_NUMBERS = ["rank", "first", "end", "positions", "heads", "start", "room"]
_X, _Y = ([f"{tensor}_{axis}" for axis in ("rank", "batch", "position", "head")] for tensor in "xy")


@triton.jit
def _rows(row, block, positions, heads, rank_stride, batch_stride, position_stride, head_stride):
    """From the beginning of a tensor to rows of a block."""
    position = row // heads
    offset = block.to(tl.int64) * rank_stride + (position // positions).to(tl.int64) * batch_stride
    offset += (position % positions).to(tl.int64) * position_stride
    return offset + (row % heads).to(tl.int64) * head_stride


@triton.jit(do_not_specialize=[*_NUMBERS, *_X, *_Y])
def write(
    x, y, memories, rank, first, end, positions, heads, start, room,
    x_rank, x_batch, x_position, x_head, y_rank, y_batch, y_position, y_head,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy each block of x to the memory of its process, and the own one to y. Grid: SIZE, rows by ROWS."""
    # Each process begins with another, and what stays here is copied while the links are busy.
    to = (rank + 1 + tl.program_id(0)) % SIZE
    row = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < end)[:, None] & (column < WIDTH)
    source = _rows(row, to, positions, heads, x_rank, x_batch, x_position, x_head)
    values = tl.load(x + source[:, None] + column, mask=inside)
    if to == rank:
        own = _rows(row, to, positions, heads, y_rank, y_batch, y_position, y_head)
        tl.store(y + own[:, None] + column, values, mask=inside)
    else:
        place = (rank - to + SIZE - 1) % SIZE
        there = tl.load(memories + to).to(x.dtype) + start + place.to(tl.int64) * room
        tl.store(there + (row - first).to(tl.int64)[:, None] * WIDTH + column, values, mask=inside)


@triton.jit(do_not_specialize=[*_NUMBERS, *_Y])
def read(
    y, memories, rank, first, end, positions, heads, start, room,
    y_rank, y_batch, y_position, y_head,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy what others wrote into the own memory to y. Grid: SIZE - 1, rows by ROWS."""
    writer = (rank + 1 + tl.program_id(0)) % SIZE
    row = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < end)[:, None] & (column < WIDTH)
    here = tl.load(memories + rank).to(y.dtype) + start + tl.program_id(0).to(tl.int64) * room
    values = tl.load(here + (row - first).to(tl.int64)[:, None] * WIDTH + column, mask=inside)
    target = _rows(row, writer, positions, heads, y_rank, y_batch, y_position, y_head)
    tl.store(y + target[:, None] + column, values, mask=inside)

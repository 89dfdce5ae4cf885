"""Device code of `veomni_hook.kernels.attention.rescaled`.

Forward:  y = x * p, p = sigmoid(lse - sink)
Backward: dx = dy * p, dlse = p * (1 - p) * sum(dy * x), and dsink is the sum of -dlse
Shapes: x and dx ``[batch, heads, length, COLUMNS]``, y and dy ``[batch, length, heads, COLUMNS]``, with their
strides before the columns; lse and dlse ``[batch, heads, length]``, float32. All steps are in float32.
Grid: cdiv(length, ROWS), heads, batch.
"""

import triton
import triton.language as tl

__all__ = ["backward", "forward"]


@triton.jit
def _places(base, stride_batch, stride_head, stride_position, position, column):
    """Where the values of some positions are, ``[ROWS, COLUMNS]``, in this program's head and batch."""
    begin = tl.program_id(2).to(tl.int64) * stride_batch + tl.program_id(1).to(tl.int64) * stride_head
    return base + begin + position[:, None] * stride_position + column[None, :]


@triton.jit
def _share(lse, sinks, position, length):
    """p of some positions, and where their lse is."""
    place = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * length + position
    there = tl.load(lse + place, mask=position < length, other=0.0)
    return tl.sigmoid(there - tl.load(sinks + tl.program_id(1)).to(tl.float32)), place


@triton.jit
def forward(
    x, lse, sinks,
    y,  # the result
    length, x_batch, x_head, x_position, y_batch, y_head, y_position,
    COLUMNS: tl.constexpr,  # a power of two
    ROWS: tl.constexpr,
):  # fmt: skip
    """y, as above."""
    position = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    kept = (position < length)[:, None]
    p, _ = _share(lse, sinks, position, length)
    x32 = tl.load(_places(x, x_batch, x_head, x_position, position, column), mask=kept, other=0.0)
    y_place = _places(y, y_batch, y_head, y_position, position, column)
    tl.store(y_place, (x32.to(tl.float32) * p[:, None]).to(y.dtype.element_ty), mask=kept)


@triton.jit
def backward(
    x, lse, sinks, dy,
    dx, dlse,  # the results
    length, x_batch, x_head, x_position, dy_batch, dy_head, dy_position, dx_batch, dx_head, dx_position,
    COLUMNS: tl.constexpr,  # a power of two
    ROWS: tl.constexpr,
):  # fmt: skip
    """dx and dlse, as above."""
    position = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    kept = (position < length)[:, None]
    p, place = _share(lse, sinks, position, length)
    x32 = tl.load(_places(x, x_batch, x_head, x_position, position, column), mask=kept, other=0.0)
    dy_place = _places(dy, dy_batch, dy_head, dy_position, position, column)
    dy32 = tl.load(dy_place, mask=kept, other=0.0).to(tl.float32)
    dx_place = _places(dx, dx_batch, dx_head, dx_position, position, column)
    tl.store(dx_place, (dy32 * p[:, None]).to(dx.dtype.element_ty), mask=kept)
    dp = tl.sum(dy32 * x32.to(tl.float32), axis=1)
    tl.store(dlse + place, p * (1.0 - p) * dp, mask=position < length)

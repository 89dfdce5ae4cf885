"""Device code of `veomni_hook.kernels.qk_norm_rotary.triton`, which launches it.

A row x is the COLUMNS numbers of one head of q or k at one position: two halves, 1 and 2, of HALF rotated
numbers, and REST others, 3. In float32:

Forward:  s = rsqrt(mean(x^2) + eps),  xhat = x * s,  n = (factor * xhat.to(MIDDLE)).to(NORMED)
          y1 = n1 * cos1 - n2 * sin1,  y2 = n2 * cos2 + n1 * sin2,  y3 = n3, with products rounded to PRODUCT
Backward: dn1 = dy1 * cos1 + dy2 * sin2,  dn2 = dy2 * cos2 - dy1 * sin1,  dn3 = dy3
          dx = s * (g - xhat * mean(g * xhat)), g = factor * dn
          dweight = sum over rows of dn * xhat.to(MIDDLE)
Shapes: q, k [batch, heads, length, COLUMNS] of any strides but the last, which is 1; ``stride_T_head`` is the
distance of heads in the tensor T, and so on. Dtypes are float32, bfloat16 or float16.

``factor`` is numbered by FACTOR, see `veomni_hook.kernels.rms_norm.device.load_factor`. A program handles all
heads of a position, so that cos and sin are read once. Parameters are not grouped but ordered by tensor:
Triton 3.2, the oldest supported release, takes no named tuples.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import load_factor, through_norm

__all__ = ["backward", "forward"]


@triton.jit
def _factors(
    weight, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Factors of the normalised halves and the rest, in float32."""
    column, column_of_rest = tl.arange(0, HALF_BLOCK), tl.arange(0, REST_BLOCK)
    factor1 = load_factor(weight, column, column < HALF, FACTOR, HALF_BLOCK)
    factor2 = load_factor(weight + HALF, column, column < HALF, FACTOR, HALF_BLOCK)
    factor3 = load_factor(weight + 2 * HALF, column_of_rest, column_of_rest < REST, FACTOR, REST_BLOCK)
    return factor1, factor2, factor3


@triton.jit
def _tables(cos, sin, inside, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """cos and sin of both halves at one position, in float32; 0 at positions that are not ``inside``."""
    column = tl.arange(0, HALF_BLOCK)
    kept = (column < HALF) & inside
    # Rows stream through the cache; keep the tables, which every batch reads again.
    cos1 = tl.load(cos + column, mask=kept, other=0.0, eviction_policy="evict_last").to(tl.float32)
    cos2 = tl.load(cos + HALF + column, mask=kept, other=0.0, eviction_policy="evict_last").to(tl.float32)
    sin1 = tl.load(sin + column, mask=kept, other=0.0, eviction_policy="evict_last").to(tl.float32)
    sin2 = tl.load(sin + HALF + column, mask=kept, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return cos1, cos2, sin1, sin2


@triton.jit
def _read(
    x, begin, stride_head, first, inside,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr,
):  # fmt: skip
    """``COUNT`` numbers of each of ``BLOCK`` heads from ``first`` on, in float32."""
    head = first + tl.arange(0, BLOCK).to(tl.int64)
    column = tl.arange(0, COUNT_BLOCK)
    kept = ((head < HEADS) & inside)[:, None] & (column < COUNT)[None, :]
    place = begin + head[:, None] * stride_head + column[None, :]
    return tl.load(x + place, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _write(
    y, begin, stride_head, first, inside, value,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what `_read` reads."""
    head = first + tl.arange(0, BLOCK).to(tl.int64)
    column = tl.arange(0, COUNT_BLOCK)
    kept = ((head < HEADS) & inside)[:, None] & (column < COUNT)[None, :]
    place = begin + head[:, None] * stride_head + column[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=kept)


@triton.jit
def _normed(x, scale, factor, MIDDLE: tl.constexpr, NORMED: tl.constexpr):
    xhat = (x * scale[:, None]).to(MIDDLE).to(tl.float32)
    return (xhat * factor[None, :]).to(NORMED).to(tl.float32)


@triton.jit
def _product(n, table, PRODUCT: tl.constexpr):
    return (n * table[None, :]).to(PRODUCT).to(tl.float32)


@triton.jit
def _turn(
    x, y, eps, x_begin, stride_x_head, y_begin, stride_y_head, inside,
    factor1, factor2, factor3, cos1, cos2, sin1, sin2,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    MIDDLE: tl.constexpr, NORMED: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate all heads of one position of x into y; both begin at this position."""
    COLUMNS: tl.constexpr = 2 * HALF + REST
    for first in tl.static_range(0, HEADS, BLOCK):
        x1 = _read(x, x_begin, stride_x_head, first, inside, HEADS, BLOCK, HALF, HALF_BLOCK)
        x2 = _read(x, x_begin + HALF, stride_x_head, first, inside, HEADS, BLOCK, HALF, HALF_BLOCK)
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if REST:
            x3 = _read(x, x_begin + 2 * HALF, stride_x_head, first, inside, HEADS, BLOCK, REST, REST_BLOCK)
            squares += tl.sum(x3 * x3, axis=1)
        scale = tl.rsqrt(squares / COLUMNS + eps)
        n1 = _normed(x1, scale, factor1, MIDDLE, NORMED)
        n2 = _normed(x2, scale, factor2, MIDDLE, NORMED)
        y1 = _product(n1, cos1, PRODUCT) - _product(n2, sin1, PRODUCT)
        y2 = _product(n2, cos2, PRODUCT) + _product(n1, sin2, PRODUCT)
        _write(y, y_begin, stride_y_head, first, inside, y1, HEADS, BLOCK, HALF, HALF_BLOCK)
        _write(y, y_begin + HALF, stride_y_head, first, inside, y2, HEADS, BLOCK, HALF, HALF_BLOCK)
        if REST:
            n3 = _normed(x3, scale, factor3, MIDDLE, NORMED)
            _write(y, y_begin + 2 * HALF, stride_y_head, first, inside, n3, HEADS, BLOCK, REST, REST_BLOCK)


@triton.jit
def _turn_back(
    x, dy, dx, eps, x_begin, stride_x_head, dy_begin, stride_dy_head, dx_begin, inside,
    factor1, factor2, factor3, cos1, cos2, sin1, sin2, total1, total2, total3,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    MIDDLE: tl.constexpr, TO_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Gradients of all heads of one position: dx, and the totals with what they add to the weight's."""
    COLUMNS: tl.constexpr = 2 * HALF + REST
    for first in tl.static_range(0, HEADS, BLOCK):
        x1 = _read(x, x_begin, stride_x_head, first, inside, HEADS, BLOCK, HALF, HALF_BLOCK)
        x2 = _read(x, x_begin + HALF, stride_x_head, first, inside, HEADS, BLOCK, HALF, HALF_BLOCK)
        dy1 = _read(dy, dy_begin, stride_dy_head, first, inside, HEADS, BLOCK, HALF, HALF_BLOCK)
        dy2 = _read(dy, dy_begin + HALF, stride_dy_head, first, inside, HEADS, BLOCK, HALF, HALF_BLOCK)
        dn1 = dy1 * cos1[None, :] + dy2 * sin2[None, :]
        dn2 = dy2 * cos2[None, :] - dy1 * sin1[None, :]
        g1, g2 = dn1 * factor1[None, :], dn2 * factor2[None, :]
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        product = tl.sum(g1 * x1 + g2 * x2, axis=1)
        if REST:
            x3 = _read(x, x_begin + 2 * HALF, stride_x_head, first, inside, HEADS, BLOCK, REST, REST_BLOCK)
            dn3 = _read(
                dy, dy_begin + 2 * HALF, stride_dy_head, first, inside, HEADS, BLOCK, REST, REST_BLOCK
            )  # fmt: skip
            g3 = dn3 * factor3[None, :]
            squares += tl.sum(x3 * x3, axis=1)
            product += tl.sum(g3 * x3, axis=1)
        scale = tl.rsqrt(squares / COLUMNS + eps)
        mean = product * scale / COLUMNS
        xhat1 = x1 * scale[:, None]
        dx1 = through_norm(g1, xhat1, mean, scale)
        xhat2 = x2 * scale[:, None]
        dx2 = through_norm(g2, xhat2, mean, scale)
        _write(dx, dx_begin, COLUMNS, first, inside, dx1, HEADS, BLOCK, HALF, HALF_BLOCK)
        _write(dx, dx_begin + HALF, COLUMNS, first, inside, dx2, HEADS, BLOCK, HALF, HALF_BLOCK)
        if REST:
            xhat3 = x3 * scale[:, None]
            dx3 = through_norm(g3, xhat3, mean, scale)
            _write(dx, dx_begin + 2 * HALF, COLUMNS, first, inside, dx3, HEADS, BLOCK, REST, REST_BLOCK)
        if TO_WEIGHT:
            total1 += dn1 * xhat1.to(MIDDLE).to(tl.float32)
            total2 += dn2 * xhat2.to(MIDDLE).to(tl.float32)
            if REST:
                total3 += dn3 * xhat3.to(MIDDLE).to(tl.float32)
    return total1, total2, total3


@triton.jit
def forward(
    q,  # [batch, Q_HEADS, length, COLUMNS], strided: the queries
    k,  # [batch, K_HEADS, length, COLUMNS], strided, the dtype of q: the keys
    q_weight,  # [COLUMNS]: the weight of the queries' norm
    k_weight,  # [COLUMNS], the dtype of q_weight: the weight of the keys' norm
    cos,  # [batch or 1, length, 2 * HALF], strided; of one batch, the stride is 0
    sin,  # like cos
    q_out,  # like q, strided: a result
    k_out,  # like k, strided, the dtype of q_out: a result
    q_eps,
    k_eps,
    positions,  # batch * length
    length,
    stride_q_batch, stride_q_head, stride_q_position,
    stride_k_batch, stride_k_head, stride_k_position,
    stride_cos_batch, stride_cos_position,
    stride_sin_batch, stride_sin_position,
    stride_q_out_batch, stride_q_out_head, stride_q_out_position,
    stride_k_out_batch, stride_k_out_head, stride_k_out_position,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_BLOCK: tl.constexpr,  # heads of q per tile
    K_BLOCK: tl.constexpr,  # heads of k per tile
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr,  # a power of two that holds HALF
    REST_BLOCK: tl.constexpr,  # a power of two that holds REST
    FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,  # dtype
    NORMED: tl.constexpr,  # dtype
    PRODUCT: tl.constexpr,  # dtype
    POSITIONS: tl.constexpr,  # per program
):  # fmt: skip
    """q_out and k_out from q and k, as y from x. Grid: cdiv(positions, POSITIONS)."""
    q_factor1, q_factor2, q_factor3 = _factors(q_weight, HALF, REST, HALF_BLOCK, REST_BLOCK, FACTOR)
    k_factor1, k_factor2, k_factor3 = _factors(k_weight, HALF, REST, HALF_BLOCK, REST_BLOCK, FACTOR)
    for number in tl.static_range(POSITIONS):
        position = tl.program_id(0) * POSITIONS + number
        inside = position < positions
        b, s = (position // length).to(tl.int64), (position % length).to(tl.int64)
        cos1, cos2, sin1, sin2 = _tables(
            cos + b * stride_cos_batch + s * stride_cos_position,
            sin + b * stride_sin_batch + s * stride_sin_position, inside, HALF, HALF_BLOCK,
        )  # fmt: skip
        _turn(
            q, q_out, q_eps, b * stride_q_batch + s * stride_q_position, stride_q_head,
            b * stride_q_out_batch + s * stride_q_out_position, stride_q_out_head, inside,
            q_factor1, q_factor2, q_factor3, cos1, cos2, sin1, sin2,
            Q_HEADS, Q_BLOCK, HALF, REST, HALF_BLOCK, REST_BLOCK, MIDDLE, NORMED, PRODUCT,
        )  # fmt: skip
        _turn(
            k, k_out, k_eps, b * stride_k_batch + s * stride_k_position, stride_k_head,
            b * stride_k_out_batch + s * stride_k_out_position, stride_k_out_head, inside,
            k_factor1, k_factor2, k_factor3, cos1, cos2, sin1, sin2,
            K_HEADS, K_BLOCK, HALF, REST, HALF_BLOCK, REST_BLOCK, MIDDLE, NORMED, PRODUCT,
        )  # fmt: skip


@triton.jit
def _keep(
    partial, total1, total2, total3,
    HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the totals of one weight, summed over heads, as a row of ``partial``."""
    column, column_of_rest = tl.arange(0, HALF_BLOCK), tl.arange(0, REST_BLOCK)
    tl.store(partial + column, tl.sum(total1, axis=0), mask=column < HALF)
    tl.store(partial + HALF + column, tl.sum(total2, axis=0), mask=column < HALF)
    if REST:
        tl.store(partial + 2 * HALF + column_of_rest, tl.sum(total3, axis=0), mask=column_of_rest < REST)


@triton.jit
def backward(
    q,  # [batch, Q_HEADS, length, COLUMNS], strided: the queries
    k,  # [batch, K_HEADS, length, COLUMNS], strided, the dtype of q: the keys
    q_weight,  # [COLUMNS]: the weight of the queries' norm
    k_weight,  # [COLUMNS], the dtype of q_weight: the weight of the keys' norm
    cos,  # [batch or 1, length, 2 * HALF], strided; of one batch, the stride is 0
    sin,  # like cos
    q_grad,  # like q, strided: the gradient of q_out
    k_grad,  # like k, strided: the gradient of k_out
    dq,  # [batch, length, Q_HEADS, COLUMNS], the dtype of q: a result
    dk,  # [batch, length, K_HEADS, COLUMNS], the dtype of q: a result
    partial,  # [programs, 2, COLUMNS], float32: each program's part of both weights' gradients; if TO_WEIGHT
    q_eps,
    k_eps,
    positions,  # batch * length
    length,
    stride_q_batch, stride_q_head, stride_q_position,
    stride_k_batch, stride_k_head, stride_k_position,
    stride_cos_batch, stride_cos_position,
    stride_sin_batch, stride_sin_position,
    stride_q_grad_batch, stride_q_grad_head, stride_q_grad_position,
    stride_k_grad_batch, stride_k_grad_head, stride_k_grad_position,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_BLOCK: tl.constexpr,  # heads of q per tile
    K_BLOCK: tl.constexpr,  # heads of k per tile
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr,  # a power of two that holds HALF
    REST_BLOCK: tl.constexpr,  # a power of two that holds REST
    FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,  # dtype
    TO_WEIGHT: tl.constexpr,
    POSITIONS: tl.constexpr,  # per step of a program
    STAGES: tl.constexpr,  # loads in flight
):  # fmt: skip
    """dq and dk as dx, and partial as dweight over the program's positions.

    Grid: programs, each of which handles every programs-th block of POSITIONS positions.
    """
    COLUMNS: tl.constexpr = 2 * HALF + REST
    q_factor1, q_factor2, q_factor3 = _factors(q_weight, HALF, REST, HALF_BLOCK, REST_BLOCK, FACTOR)
    k_factor1, k_factor2, k_factor3 = _factors(k_weight, HALF, REST, HALF_BLOCK, REST_BLOCK, FACTOR)
    q_total1 = tl.zeros([Q_BLOCK, HALF_BLOCK], tl.float32)
    q_total2 = tl.zeros([Q_BLOCK, HALF_BLOCK], tl.float32)
    q_total3 = tl.zeros([Q_BLOCK, REST_BLOCK], tl.float32)
    k_total1 = tl.zeros([K_BLOCK, HALF_BLOCK], tl.float32)
    k_total2 = tl.zeros([K_BLOCK, HALF_BLOCK], tl.float32)
    k_total3 = tl.zeros([K_BLOCK, REST_BLOCK], tl.float32)
    blocks = tl.cdiv(positions, POSITIONS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        for number in tl.static_range(POSITIONS):
            position = block * POSITIONS + number
            inside = position < positions
            b, s = (position // length).to(tl.int64), (position % length).to(tl.int64)
            row_of_dx = position.to(tl.int64)
            cos1, cos2, sin1, sin2 = _tables(
                cos + b * stride_cos_batch + s * stride_cos_position,
                sin + b * stride_sin_batch + s * stride_sin_position, inside, HALF, HALF_BLOCK,
            )  # fmt: skip
            q_total1, q_total2, q_total3 = _turn_back(
                q, q_grad, dq, q_eps, b * stride_q_batch + s * stride_q_position, stride_q_head,
                b * stride_q_grad_batch + s * stride_q_grad_position, stride_q_grad_head,
                row_of_dx * (Q_HEADS * COLUMNS), inside,
                q_factor1, q_factor2, q_factor3, cos1, cos2, sin1, sin2, q_total1, q_total2, q_total3,
                Q_HEADS, Q_BLOCK, HALF, REST, HALF_BLOCK, REST_BLOCK, MIDDLE, TO_WEIGHT,
            )  # fmt: skip
            k_total1, k_total2, k_total3 = _turn_back(
                k, k_grad, dk, k_eps, b * stride_k_batch + s * stride_k_position, stride_k_head,
                b * stride_k_grad_batch + s * stride_k_grad_position, stride_k_grad_head,
                row_of_dx * (K_HEADS * COLUMNS), inside,
                k_factor1, k_factor2, k_factor3, cos1, cos2, sin1, sin2, k_total1, k_total2, k_total3,
                K_HEADS, K_BLOCK, HALF, REST, HALF_BLOCK, REST_BLOCK, MIDDLE, TO_WEIGHT,
            )  # fmt: skip
    if TO_WEIGHT:
        partial_row = partial + tl.program_id(0).to(tl.int64) * (2 * COLUMNS)
        _keep(partial_row, q_total1, q_total2, q_total3, HALF, REST, HALF_BLOCK, REST_BLOCK)
        _keep(partial_row + COLUMNS, k_total1, k_total2, k_total3, HALF, REST, HALF_BLOCK, REST_BLOCK)

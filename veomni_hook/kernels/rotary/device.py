"""Device code of rotary embedding; `veomni_hook.kernels.rotary.triton` launches it.

A row, one head at one position, has COUPLES couples (x1, x2) of numbers that are rotated together, and REST
numbers that do not change. Products and sums are rounded to MIDDLE:

Forward:  y1 = x1 * cos1 - x2 * sin1,  y2 = x2 * cos2 + x1 * sin2
Backward: dx1 = dy1 * cos1 + dy2 * sin2,  dx2 = dy2 * cos2 - dy1 * sin1: the same with BACK and SWAPPED
Shapes: q, k [batch, length, heads, columns] of any strides but the last, which is 1; ``stride_T_head`` is the
distance of heads in the tensor T, and so on. Dtypes are float32, bfloat16 or float16.

A program rotates a tile of rows: POSITIONS positions by HEADS heads, heads first. Parameters are not grouped
but ordered by tensor: Triton 3.2, the oldest supported release, takes no named tuples.
"""

import triton
import triton.language as tl

__all__ = ["rotate"]


@triton.jit
def _load(
    x, place, kept, COUPLES: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, STAYS: tl.constexpr
):
    """Both members of every couple of the ``kept`` rows, which begin at ``place``, as stored.

    PAIRS: members are neighbours, else halves. STAYS: the cache evicts these numbers last.
    """
    EVICTION: tl.constexpr = "evict_last" if STAYS else ""
    if PAIRS:
        # Neighbours are loaded together and split in registers: separate loads would be of 2 bytes.
        column = tl.arange(0, 2 * BLOCK)
        inside = kept[:, None]
        if BLOCK != COUPLES:
            inside = inside & (column < 2 * COUPLES)[None, :]
        both = tl.load(x + place[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy=EVICTION)
        first, second = tl.split(tl.reshape(both, [both.shape[0], BLOCK, 2]))
    else:
        column = tl.arange(0, BLOCK)
        inside = kept[:, None]
        if BLOCK != COUPLES:
            inside = inside & (column < COUPLES)[None, :]
        first = tl.load(
            x + place[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy=EVICTION
        )
        second = tl.load(
            x + place[:, None] + (column + COUPLES)[None, :], mask=inside, other=0.0, eviction_policy=EVICTION
        )
    return first, second


@triton.jit
def _store(y, place, kept, first, second, COUPLES: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Store what `_load` loads."""
    if PAIRS:
        column = tl.arange(0, 2 * BLOCK)
        inside = kept[:, None]
        if BLOCK != COUPLES:
            inside = inside & (column < 2 * COUPLES)[None, :]
        both = tl.reshape(tl.join(first, second), [first.shape[0], 2 * BLOCK])
        tl.store(y + place[:, None] + column[None, :], both, mask=inside)
    else:
        column = tl.arange(0, BLOCK)
        inside = kept[:, None]
        if BLOCK != COUPLES:
            inside = inside & (column < COUPLES)[None, :]
        tl.store(y + place[:, None] + column[None, :], first, mask=inside)
        tl.store(y + place[:, None] + (column + COUPLES)[None, :], second, mask=inside)


@triton.jit
def _table(table, place, kept, COUPLES: tl.constexpr, BLOCK: tl.constexpr, TABLE: tl.constexpr):
    """cos or sin of the first and of the second members, in float32."""
    # Rows stream through the cache, and every head reads the tables again: keeping them saves 2 %.
    if TABLE == 0:
        inside = kept[:, None]
        column = tl.arange(0, BLOCK)
        if BLOCK != COUPLES:
            inside = inside & (column < COUPLES)[None, :]
        first = tl.load(
            table + place[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_last"
        )
        second = first
    else:
        first, second = _load(table, place, kept, COUPLES, BLOCK, TABLE == 2, True)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rows(
    x, y, cos, sin, batch, begin, head, length, heads,
    stride_x_batch, stride_x_position, stride_x_head,
    stride_y_batch, stride_y_position, stride_y_head,
    stride_table_batch, stride_table_position,
    COUPLES: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr, REST: tl.constexpr,
    REST_AT: tl.constexpr, REST_BLOCK: tl.constexpr, POSITIONS: tl.constexpr, HEADS: tl.constexpr,
    PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, TABLE: tl.constexpr, BACK: tl.constexpr,
    SWAPPED: tl.constexpr, MIDDLE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of x into y: its positions from ``begin`` and its heads from ``head`` on."""
    row = tl.arange(0, POSITIONS * HEADS)
    position = begin + row // HEADS
    head = head.to(tl.int64) + row % HEADS
    kept = (position < length) & (head < heads)
    x_place = batch * stride_x_batch + position * stride_x_position + head * stride_x_head
    y_place = batch * stride_y_batch + position * stride_y_position + head * stride_y_head
    # Of strides, Triton sees itself whether 16 divides them, and nothing else.
    TOLD: tl.constexpr = ALIGNED > 1 and ALIGNED < 16
    if TOLD:
        x_place, y_place = tl.multiple_of(x_place, ALIGNED), tl.multiple_of(y_place, ALIGNED)
    x1, x2 = _load(x + ROTATED, x_place, kept, COUPLES, BLOCK, PAIRS_IN, False)
    if POSITIONS == 1:
        # One row of the tables for all heads.
        table_place = batch * stride_table_batch + (begin + tl.arange(0, 1)) * stride_table_position
        table_kept = tl.full([1], 1, tl.int1)
    else:
        table_place = batch * stride_table_batch + position * stride_table_position
        table_kept = kept
    if TOLD:
        table_place = tl.multiple_of(table_place, ALIGNED)
    cos1, cos2 = _table(cos, table_place, table_kept, COUPLES, BLOCK, TABLE)
    sin1, sin2 = _table(sin, table_place, table_kept, COUPLES, BLOCK, TABLE)
    if SWAPPED:
        sin1, sin2 = sin2, sin1
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    x1_cos1 = (x1 * cos1).to(MIDDLE).to(tl.float32)
    x2_sin1 = (x2 * sin1).to(MIDDLE).to(tl.float32)
    x2_cos2 = (x2 * cos2).to(MIDDLE).to(tl.float32)
    x1_sin2 = (x1 * sin2).to(MIDDLE).to(tl.float32)
    if BACK:
        y1 = x1_cos1 + x2_sin1
        y2 = x2_cos2 - x1_sin2
    else:
        y1 = x1_cos1 - x2_sin1
        y2 = x2_cos2 + x1_sin2
    y1 = y1.to(MIDDLE).to(y.dtype.element_ty)
    y2 = y2.to(MIDDLE).to(y.dtype.element_ty)
    _store(y + ROTATED, y_place, kept, y1, y2, COUPLES, BLOCK, PAIRS_OUT)
    if REST:
        column = tl.arange(0, REST_BLOCK)
        inside = kept[:, None] & (column < REST)[None, :]
        rest = tl.load(x + REST_AT + x_place[:, None] + column[None, :], mask=inside, other=0.0)
        rest = rest.to(y.dtype.element_ty)
        tl.store(y + REST_AT + y_place[:, None] + column[None, :], rest, mask=inside)


@triton.jit
def rotate(
    q,  # [batch, length, q_heads, columns], strided: the queries
    k,  # [batch, length, k_heads, columns], strided, the dtype of q: the keys; q again if k_heads is 0
    q_out,  # like q, strided: a result
    k_out,  # like k, strided, the dtype of q_out: a result
    cos,  # [batch or 1, length, width], strided; of one batch, the stride is 0
    sin,  # like cos, of its strides
    length,
    blocks,  # of POSITIONS positions that cover the length
    q_heads,
    k_heads,
    q_shares,  # programs per block of positions that rotate q
    shares,  # programs per block of positions
    stride_q_batch, stride_q_position, stride_q_head,
    stride_k_batch, stride_k_position, stride_k_head,
    stride_q_out_batch, stride_q_out_position, stride_q_out_head,
    stride_k_out_batch, stride_k_out_position, stride_k_out_head,
    stride_table_batch, stride_table_position,
    COUPLES: tl.constexpr,  # per row
    BLOCK: tl.constexpr,  # a power of two that holds COUPLES
    ROTATED: tl.constexpr,  # the first column of the couples
    REST: tl.constexpr,  # columns that do not change
    REST_AT: tl.constexpr,  # the first of these columns
    REST_BLOCK: tl.constexpr,  # a power of two that holds REST, or 0
    POSITIONS: tl.constexpr,  # per program
    Q_HEADS: tl.constexpr,  # per program that rotates q
    K_HEADS: tl.constexpr,  # per program that rotates k
    PAIRS_IN: tl.constexpr,  # the members of a couple are neighbours in q and k, else halves
    PAIRS_OUT: tl.constexpr,  # the same of q_out and k_out
    TABLE: tl.constexpr,  # cos and sin have a column per couple (0), halves (1) or pairs (2)
    BACK: tl.constexpr,  # rotate in the other direction
    SWAPPED: tl.constexpr,  # the members take each other's column of sin
    MIDDLE: tl.constexpr,  # dtype
    ALIGNED: tl.constexpr,  # the greatest divisor of 16 and all strides
):  # fmt: skip
    """q_out and k_out from q and k, as y from x. Grid: batch * blocks * shares."""
    program = tl.program_id(0)
    share = program % shares
    block = program // shares
    batch = (block // blocks).to(tl.int64)
    begin = (block % blocks).to(tl.int64) * POSITIONS
    # Two calls instead of a selected pointer: the compiler knows only the alignment of arguments.
    if share < q_shares:
        _rows(
            q, q_out, cos, sin, batch, begin, share * Q_HEADS, length, q_heads,
            stride_q_batch, stride_q_position, stride_q_head,
            stride_q_out_batch, stride_q_out_position, stride_q_out_head,
            stride_table_batch, stride_table_position, COUPLES, BLOCK, ROTATED, REST, REST_AT, REST_BLOCK,
            POSITIONS, Q_HEADS, PAIRS_IN, PAIRS_OUT, TABLE, BACK, SWAPPED, MIDDLE, ALIGNED,
        )  # fmt: skip
    else:
        _rows(
            k, k_out, cos, sin, batch, begin, (share - q_shares) * K_HEADS, length, k_heads,
            stride_k_batch, stride_k_position, stride_k_head,
            stride_k_out_batch, stride_k_out_position, stride_k_out_head,
            stride_table_batch, stride_table_position, COUPLES, BLOCK, ROTATED, REST, REST_AT, REST_BLOCK,
            POSITIONS, K_HEADS, PAIRS_IN, PAIRS_OUT, TABLE, BACK, SWAPPED, MIDDLE, ALIGNED,
        )  # fmt: skip

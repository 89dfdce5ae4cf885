"""Device code of low-rank adapters of experts' weights.

`veomni_hook.kernels.moe_experts.triton_adapters` launches `low_rows`; the kernels of `.device` call
`add_low_rank` after their own product; that file defines T, R, E, D and tiles.

Forward:  low = s x[token] A_e';  then  x[token] W_e' + low B_e'
Backward: low = s dy B_e;  then  dy W_e + low A_e
RANK: columns of ``low``, a power of two of at least 16; what an adapter's rank lacks is zeros.
"""

import triton
import triton.language as tl

__all__ = ["add_low_rank", "low_rows"]


@triton.jit
def add_low_rank(
    acc,  # [BM, BN], float32: the tile itself, not a pointer
    low,  # [R, RANK], D: a pointer
    low_w,  # [E, width, RANK], or [E, RANK, width] if TURNED, D: a pointer
    rows, row_mask,  # [BM]: numbers of rows, whether they exist
    expert,
    position, exists,  # [BN]: numbers of columns, whether they exist
    width,
    RANK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """``acc`` plus the rows of ``low`` times columns of the expert's ``low_w``."""
    BR: tl.constexpr = RANK if RANK < 64 else 64
    low_row = low + rows.to(tl.int64)[:, None] * RANK
    low_w_expert = low_w + expert.to(tl.int64) * width * RANK
    # Unrolled: a second loop would keep the loops over tiles and depth from being merged.
    for first in tl.static_range(0, RANK, BR):
        rank = first + tl.arange(0, BR)
        a = tl.load(low_row + rank[None, :], mask=row_mask[:, None], other=0.0)
        if TURNED:
            b = tl.load(
                low_w_expert + rank[:, None] * width + position[None, :], mask=exists[None, :], other=0.0
            )
        else:
            b = tl.load(
                low_w_expert + position[None, :] * RANK + rank[:, None], mask=exists[None, :], other=0.0
            )
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["max_tiles"])
def low_rows(
    x,  # [T, inner], or [R, inner] if ORDERED, D
    w,  # [E, RANK, inner] by its strides, D
    low,  # [R, RANK], D: written
    tokens,  # [R], int32: the token of a row; read unless ORDERED
    tiles,  # [3 * max_tiles + 1], int32
    max_tiles, inner, stride_x_row, stride_w_expert, stride_w_rank, stride_w_inner,
    scale,  # float
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, RANK: tl.constexpr, ORDERED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """low = scale x[token] w_e', rounded once. Grid: (programs,) over tiles of BM rows and BR columns."""
    BR: tl.constexpr = RANK if RANK < 128 else 128
    m_tiles = tl.load(tiles + 3 * max_tiles)
    r_tiles: tl.constexpr = RANK // BR
    lane = tl.arange(0, BK)
    for index in tl.range(tl.program_id(0), m_tiles * r_tiles, tl.num_programs(0)):
        m = index // r_tiles
        expert, first_row, end = (
            tl.load(tiles + m), tl.load(tiles + max_tiles + m), tl.load(tiles + 2 * max_tiles + m)
        )  # fmt: skip
        rows = first_row + tl.arange(0, BM)
        row_mask = rows < end
        # A row past the end is computed from an existing row and not stored.
        if ORDERED:
            x_rows = tl.where(row_mask, rows, first_row).to(tl.int64)
        else:
            x_rows = tl.load(tokens + rows, mask=row_mask, other=0).to(tl.int64)
        rank = index % r_tiles * BR + tl.arange(0, BR)
        x_pointers = x + x_rows[:, None] * stride_x_row + lane[None, :]
        w_pointers = w + expert.to(tl.int64) * stride_w_expert + rank[None, :] * stride_w_rank
        w_pointers += lane[:, None] * stride_w_inner
        acc = tl.zeros([BM, BR], tl.float32)
        for k in tl.range(0, inner, BK, num_stages=STAGES):
            if EVEN:
                a = tl.load(x_pointers + k)
                b = tl.load(w_pointers + k * stride_w_inner)
            else:
                a = tl.load(x_pointers + k, mask=lane[None, :] < inner - k, other=0.0)
                b = tl.load(w_pointers + k * stride_w_inner, mask=lane[:, None] < inner - k, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        low_pointers = low + rows.to(tl.int64)[:, None] * RANK + rank[None, :]
        tl.store(low_pointers, (acc * scale).to(low.dtype.element_ty), mask=row_mask[:, None])

"""Device code of the gradients of gate and up in Gluon, for Hopper; `.gluon_products` launches it.

Backward: dh = dout[token] D_e';  [dg, du] = gate'(g, u) (w dh);  <dh, h>;  w h
Shapes and terms: `.device`, and `.gluon_device` for slabs and stages. Sums are in float32.

Four warps load slabs, eight multiply, and pass dh, rounded to D, to four that compute what follows while the
next tile is multiplied. Without a routing weight, dh may be too large for float16, so D is bfloat16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from veomni_hook.kernels.gated_mlp.device import gated_backward
from veomni_hook.kernels.moe_experts.device import read_tile, tile_at
from veomni_hook.kernels.moe_experts.gluon_device import barrier, halves, pipeline

__all__ = ["gate_up_backward"]

# Rows that follow a product at a time: more would spill registers.
_ROWS = gl.constexpr(16)


@gluon.jit
def _load(
    dout, w, tokens, tiles, max_tiles, inner, columns, stride_dout_row, dout_slabs, w_slabs, full, empty,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Fill the slabs of every tile. Rows past an expert's end are that of token 0; no result is stored."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    number = gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
    m_tiles = gl.load(tiles + 3 * max_tiles)
    n_tiles = gl.cdiv(columns, BN)
    slab = 0
    for index in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = tile_at(index, m_tiles, n_tiles, GROUP)
        expert, first_row, end = read_tile(tiles, max_tiles, m)
        rows = first_row + lane
        token = gl.load(tokens + rows, mask=rows < end, other=0)
        pointers = dout + token.to(gl.int64)[:, None] * stride_dout_row + number[None, :]
        for k in range(0, inner, BK):
            stage = slab % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((slab // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, BN * BK * 2)
            if TRANSPOSED:
                tma.async_copy_global_to_shared(w, [expert * inner + k, n * BN], ready, w_slabs.index(stage))
            else:
                tma.async_copy_global_to_shared(
                    w, [expert * columns + n * BN, k], ready, w_slabs.index(stage)
                )
            async_copy.async_copy_global_to_shared(dout_slabs.index(stage), pointers + k)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            slab += 1


@gluon.jit
def _multiply(
    tiles, max_tiles, inner, columns, dout_slabs, w_slabs, full, empty, passed, ready, free,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Pass on dh, tile after tile."""
    # A quarter of the registers each of 512 threads has would not do for an instruction of all columns.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN // 2, 16])
    dtype: gl.constexpr = passed.dtype
    count = gl.load(tiles + 3 * max_tiles) * gl.cdiv(columns, BN)
    slab = 0
    tile = 0
    for _ in range(gl.program_id(0), count, gl.num_programs(0)):
        acc = warpgroup_mma_init(gl.zeros([BM, BN], gl.float32, layout))
        for k in range(0, inner, BK):
            stage = slab % STAGES
            mbarrier.wait(full.index(stage), (slab // STAGES) & 1)
            # The product reads what cp.async has written as the other proxy.
            fence_async_shared()
            if TRANSPOSED:
                acc = warpgroup_mma(dout_slabs.index(stage), w_slabs.index(stage), acc, is_async=True)
            else:
                turned = w_slabs.index(stage).permute((1, 0))
                acc = warpgroup_mma(dout_slabs.index(stage), turned, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            # The product before this one is done.
            mbarrier.arrive(empty.index((slab + STAGES - 1) % STAGES), pred=k > 0)
            slab += 1
        dh = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((slab + STAGES - 1) % STAGES))
        first, second = halves(dh.to(dtype), BM, BN)
        part_0, part_1 = halves(first, BM, BN // 2)
        part_2, part_3 = halves(second, BM, BN // 2)
        mbarrier.wait(free, (tile & 1) ^ 1)
        passed.index(0).store(part_0)
        passed.index(1).store(part_1)
        passed.index(2).store(part_2)
        passed.index(3).store(part_3)
        barrier()
        mbarrier.arrive(ready)
        tile += 1


@gluon.jit
def _gate_and_up(pointers, columns, exist, PAIRED: gl.constexpr):
    """Start loading g and u of some columns."""
    gate = gl.load(pointers, mask=exist[:, None], other=0.0)
    up = gate
    if PAIRED:
        up = gl.load(pointers + columns, mask=exist[:, None], other=0.0)
    return gate, up


@gluon.jit
def _gradients(
    gate, up, dh, share, gradients, h, exist, columns,
    PAIRED: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Write dg, du and w h of some columns, and return their sums of dh * h."""
    dtype: gl.constexpr = dh.dtype
    dh = dh.to(gl.float32)
    # These forms have neither a limit nor an alpha.
    dgate, dup, y = gated_backward(
        gate.to(gl.float32), up.to(gl.float32), dh * share, 0.0, 0.0, FORM, ACTIVATION, gl.float32
    )
    gl.store(gradients, dgate.to(dtype), mask=exist[:, None])
    if PAIRED:
        gl.store(gradients + columns, dup.to(dtype), mask=exist[:, None])
    gl.store(h, (y * share).to(dtype), mask=exist[:, None])
    return gl.sum(dh * y, axis=1)


@gluon.jit
def _finish(
    products, gradients, h, partial, pairs, weights, num_pairs, tiles, max_tiles, columns, passed, ready,
    free, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, PAIRED: gl.constexpr, FORM: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """What follows the products: 16 rows at a time, and 64 of their columns while g and u of 128 more arrive.

    Nothing else uses a tile's rows and columns, so gradients may be written in place.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PARTS: gl.constexpr = BN // 64
    dh_parts = passed._reinterpret(passed.dtype, [PARTS * (BM // _ROWS), _ROWS, 64], passed.layout)
    lane = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    number = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    width = (2 if PAIRED else 1) * columns
    m_tiles = gl.load(tiles + 3 * max_tiles)
    n_tiles = gl.cdiv(columns, BN)
    tile = 0
    for index in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = tile_at(index, m_tiles, n_tiles, GROUP)
        _, first_row, end = read_tile(tiles, max_tiles, m)
        c = n * BN
        rows = first_row + lane
        exist = rows < end
        pair = gl.load(pairs + rows, mask=exist, other=0)
        weight = gl.load(weights + pair, mask=exist, other=0.0)
        pointers = products + rows.to(gl.int64)[:, None] * width + (c + number)[None, :]
        gate, up = _gate_and_up(pointers, columns, exist, PAIRED)
        next_gate, next_up = _gate_and_up(pointers + 64, columns, exist & (c + 64 < columns), PAIRED)
        mbarrier.wait(ready, tile & 1)
        for r in range(0, BM, _ROWS):
            rows = first_row + r + lane
            exist = rows < end
            share = gl.expand_dims(weight.to(gl.float32), 1)
            below = gl.where(r + _ROWS < BM, rows + _ROWS, end)
            pair = gl.load(pairs + below, mask=below < end, other=0)
            weight = gl.load(weights + pair, mask=below < end, other=0.0)
            at = rows.to(gl.int64)[:, None] * width + (c + number)[None, :]
            at_h = rows.to(gl.int64)[:, None] * columns + (c + number)[None, :]
            sums = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, layout))
            for part in gl.static_range(PARTS):
                column = c + part * 64
                if part + 2 < PARTS:
                    pointers = products + at + (part + 2) * 64
                    there = exist & (column + 128 < columns)
                else:
                    pointers = products + at + _ROWS * width + (part + 2 - PARTS) * 64
                    there = (below < end) & (column + 128 - BN < columns)
                last_gate, last_up = _gate_and_up(pointers, columns, there, PAIRED)
                if column < columns:
                    dh = dh_parts.index(part * (BM // _ROWS) + r // _ROWS).load(layout)
                    sums += _gradients(
                        gate, up, dh, share, gradients + at + part * 64, h + at_h + part * 64, exist, columns,
                        PAIRED, FORM, ACTIVATION,
                    )  # fmt: skip
                gate, up, next_gate, next_up = next_gate, next_up, last_gate, last_up
            gl.store(partial + n.to(gl.int64) * num_pairs + rows, sums, mask=exist)
        barrier()
        mbarrier.arrive(free)
        tile += 1


@gluon.jit(do_not_specialize=["max_tiles", "num_pairs"])
def gate_up_backward(
    dout,  # [T, H], D: the result's gradient, gathered
    w,  # a descriptor of [E * I, H], or [E * H, I] if TRANSPOSED, D: the second product's weight
    products,  # [R, W], D: g and u, as `device.gate_up` kept them
    gradients,  # [R, W], D: dg and du; written; may be ``products``
    h,  # [R, I], D: w h, rounded once; written
    partial,  # [n_tiles, R], float32: a tile's sums of dh * h, for the routing weight's gradient; written
    tokens,  # [R], int32: the token of a row
    pairs,  # [R], int32: the pair of a row
    weights,  # [T, K], float: routing weights of pairs
    tiles,  # [3 * max_tiles + 1], int32
    max_tiles, inner, columns, num_pairs,  # inner is H, columns is I, num_pairs is R
    stride_dout_row,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TRANSPOSED: gl.constexpr, PAIRED: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr,
    SLAB_LAYOUT: gl.constexpr, PART_LAYOUT: gl.constexpr,
):  # fmt: skip
    """What `device.gate_up_backward` computes, for H a multiple of BK, and I of 64.

    FORM and PAIRED are 0 and 1, or 4 and 0: a gate times up, or a gate alone, both without a limit.

    Grid: (programs,) over tiles of BM = 128 rows and BN = 256 columns of h. Columns from I on are zeros,
    another expert's numbers or u: they are multiplied, and nothing is made of them.
    """
    gl.static_assert((FORM == 0 and PAIRED == 1) or (FORM == 4 and PAIRED == 0))
    gl.static_assert(w.dtype == gl.bfloat16)
    dout_slabs = gl.allocate_shared_memory(w.dtype, [STAGES, BM, BK], SLAB_LAYOUT)
    w_slabs = gl.allocate_shared_memory(
        w.dtype, [STAGES, BK, BN] if TRANSPOSED else [STAGES, BN, BK], w.layout
    )
    passed = gl.allocate_shared_memory(w.dtype, [BN // 64, BM, 64], PART_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    full, empty = pipeline(STAGES, 129, 1)
    gl.warp_specialize([
        (_multiply, (tiles, max_tiles, inner, columns, dout_slabs, w_slabs, full, empty, passed, ready, free,
                     BM, BN, BK, STAGES, TRANSPOSED)),
        (_finish, (products, gradients, h, partial, pairs, weights, num_pairs, tiles, max_tiles, columns,
                   passed, ready, free, BM, BN, GROUP, PAIRED, FORM, ACTIVATION)),
        (_load, (dout, w, tokens, tiles, max_tiles, inner, columns, stride_dout_row, dout_slabs, w_slabs,
                 full, empty, BM, BN, BK, STAGES, GROUP, TRANSPOSED)),
    ], [4, 4], [104, 56])  # fmt: skip

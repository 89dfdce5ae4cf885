"""Device code of the gradients of gate and up in Gluon, for Hopper; `.gluon_products` launches it.

Backward: dh = dout[token] D_e';  [dg, du] = gate'(g, u) (w dh);  <dh, h>;  w h
Shapes and terms: `.device`, and `.gluon_device` for slabs and stages. Sums are in float32.

Four warps load slabs, eight multiply. While they do, the first two of a tile's four parts of 64 columns of g
and u arrive in buffers; each later part arrives while the one before it is computed. Gradients leave through
the buffers of their g and u. Nothing else uses a tile's rows and columns, so they may leave in place.
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
from veomni_hook.kernels.moe_experts.device import tile_at
from veomni_hook.kernels.moe_experts.gluon_device import barrier, halves, pipeline

__all__ = ["gate_up_backward"]


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
        expert = gl.load(tiles + m)
        rows = gl.load(tiles + max_tiles + m) + lane
        end = gl.load(tiles + 2 * max_tiles + m)
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
def _product(
    acc, slab, inner, dout_slabs, w_slabs, full, empty,
    BK: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """A tile of dh, and the number of the slab after it."""
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
    return dh, slab


@gluon.jit
def _fetch(products, buffers, arrived, BUFFER: gl.constexpr, first_row, column, columns,
           BM: gl.constexpr, PAIRED: gl.constexpr):  # fmt: skip
    """Start loading [BM, 64] of g, and of u, into a pair of buffers."""
    ready = arrived.index(BUFFER)
    mbarrier.expect(ready, (2 if PAIRED else 1) * BM * 64 * 2)
    tma.async_copy_global_to_shared(products, [first_row, column], ready, buffers.index(2 * BUFFER))
    if PAIRED:
        tma.async_copy_global_to_shared(
            products, [first_row, columns + column], ready, buffers.index(2 * BUFFER + 1)
        )


@gluon.jit
def _write_rows(pointer, stride, buffer, first_row, end, column, BM: gl.constexpr):
    """Write the rows of a buffer [BM, 64] that exist."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = first_row + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    lane = column + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    pointers = pointer + rows.to(gl.int64)[:, None] * stride + lane[None, :]
    gl.store(pointers, buffer.load(layout), mask=(rows < end)[:, None])


@gluon.jit
def _write(
    gradients, h, gradients_pointer, h_pointer, buffers, BUFFER: gl.constexpr,
    first_row, end, column, columns, BM: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """Write a part's gradients and w h from their buffers, whose numbers other threads may have made."""
    gate, up, weighted = buffers.index(2 * BUFFER), buffers.index(2 * BUFFER + 1), buffers.index(4)
    if first_row + BM <= end:
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(gradients, [first_row, column], gate)
        if PAIRED:
            tma.async_copy_shared_to_global(gradients, [first_row, columns + column], up)
        tma.async_copy_shared_to_global(h, [first_row, column], weighted)
    else:
        barrier()
        width = (2 if PAIRED else 1) * columns
        _write_rows(gradients_pointer, width, gate, first_row, end, column, BM)
        if PAIRED:
            _write_rows(gradients_pointer, width, up, first_row, end, columns + column, BM)
        _write_rows(h_pointer, columns, weighted, first_row, end, column, BM)
        # Before a descriptor's load overwrites what was just read.
        fence_async_shared()


@gluon.jit
def _part(
    dh, sums, weight, gradients, h, gradients_pointer, h_pointer, buffers, arrived, PART: gl.constexpr,
    first_row, end, column, columns,
    BM: gl.constexpr, PAIRED: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Process [BM, 64] of dh, and return ``sums`` with this part's; its buffers are free afterwards."""
    BUFFER: gl.constexpr = PART % 2
    dtype: gl.constexpr = h.dtype
    # A tile uses each pair of buffers twice, so every tile begins with the same phase.
    mbarrier.wait(arrived.index(BUFFER), PART // 2)
    if column < columns:
        gate = buffers.index(2 * BUFFER).load(dh.type.layout).to(gl.float32)
        if PAIRED:
            up = buffers.index(2 * BUFFER + 1).load(dh.type.layout).to(gl.float32)
        else:
            up = gate
        share = gl.expand_dims(weight, 1)
        # These forms have neither a limit nor an alpha.
        dgate, dup, y = gated_backward(gate, up, dh * share, 0.0, 0.0, FORM, ACTIVATION, gl.float32)
        sums += gl.sum(dh * y, axis=1)
        buffers.index(2 * BUFFER).store(dgate.to(dtype))
        if PAIRED:
            buffers.index(2 * BUFFER + 1).store(dup.to(dtype))
        buffers.index(4).store((y * share).to(dtype))
        _write(
            gradients, h, gradients_pointer, h_pointer, buffers, BUFFER, first_row, end, column, columns,
            BM, PAIRED,
        )  # fmt: skip
        tma.store_wait(0)
    barrier()
    return sums


@gluon.jit
def _multiply(
    products, gradients, h, gradients_pointer, h_pointer, partial, pairs, weights, num_pairs, tiles,
    max_tiles, inner, columns, dout_slabs, w_slabs, full, empty, buffers, arrived,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TRANSPOSED: gl.constexpr, PAIRED: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The products and what follows them, of all tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    m_tiles = gl.load(tiles + 3 * max_tiles)
    n_tiles = gl.cdiv(columns, BN)
    slab = 0
    for index in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = tile_at(index, m_tiles, n_tiles, GROUP)
        first_row = gl.load(tiles + max_tiles + m)
        end = gl.load(tiles + 2 * max_tiles + m)
        c = n * BN
        _fetch(products, buffers, arrived, 0, first_row, c, columns, BM, PAIRED)
        _fetch(products, buffers, arrived, 1, first_row, c + 64, columns, BM, PAIRED)
        acc = warpgroup_mma_init(gl.zeros([BM, BN], gl.float32, layout))
        dh, slab = _product(acc, slab, inner, dout_slabs, w_slabs, full, empty, BK, STAGES, TRANSPOSED)
        first, second = halves(dh, BM, BN)
        part_0, part_1 = halves(first, BM, BN // 2)
        part_2, part_3 = halves(second, BM, BN // 2)
        of_rows: gl.constexpr = gl.SliceLayout(1, part_0.type.layout)
        rows = first_row + gl.arange(0, BM, layout=of_rows)
        pair = gl.load(pairs + rows, mask=rows < end, other=0)
        weight = gl.load(weights + pair, mask=rows < end, other=0.0).to(gl.float32)
        sums = gl.zeros([BM], gl.float32, of_rows)
        sums = _part(
            part_0, sums, weight, gradients, h, gradients_pointer, h_pointer, buffers, arrived, 0,
            first_row, end, c, columns, BM, PAIRED, FORM, ACTIVATION,
        )  # fmt: skip
        _fetch(products, buffers, arrived, 0, first_row, c + 128, columns, BM, PAIRED)
        sums = _part(
            part_1, sums, weight, gradients, h, gradients_pointer, h_pointer, buffers, arrived, 1,
            first_row, end, c + 64, columns, BM, PAIRED, FORM, ACTIVATION,
        )  # fmt: skip
        _fetch(products, buffers, arrived, 1, first_row, c + 192, columns, BM, PAIRED)
        sums = _part(
            part_2, sums, weight, gradients, h, gradients_pointer, h_pointer, buffers, arrived, 2,
            first_row, end, c + 128, columns, BM, PAIRED, FORM, ACTIVATION,
        )  # fmt: skip
        sums = _part(
            part_3, sums, weight, gradients, h, gradients_pointer, h_pointer, buffers, arrived, 3,
            first_row, end, c + 192, columns, BM, PAIRED, FORM, ACTIVATION,
        )  # fmt: skip
        gl.store(partial + n.to(gl.int64) * num_pairs + rows, sums, mask=rows < end)


@gluon.jit(do_not_specialize=["max_tiles", "num_pairs"])
def gate_up_backward(
    dout,  # [T, H], D: the result's gradient, gathered
    w,  # a descriptor of [E * I, H], or [E * H, I] if TRANSPOSED, D: the second product's weight
    products,  # a descriptor of [R, W], D: g and u, as `device.gate_up` kept them
    gradients,  # a descriptor of [R, W], D: dg and du; written; may describe ``products``
    h,  # a descriptor of [R, I], D: w h, rounded once; written
    gradients_pointer, h_pointer,  # the described tensors
    partial,  # [n_tiles, R], float32: a tile's sums of dh * h, for the routing weight's gradient; written
    tokens,  # [R], int32: the token of a row
    pairs,  # [R], int32: the pair of a row
    weights,  # [T, K], float: routing weights of pairs
    tiles,  # [3 * max_tiles + 1], int32
    max_tiles, inner, columns, num_pairs,  # inner is H, columns is I, num_pairs is R
    stride_dout_row,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TRANSPOSED: gl.constexpr, PAIRED: gl.constexpr, FORM: gl.constexpr, ACTIVATION: gl.constexpr,
    SLAB_LAYOUT: gl.constexpr, BUFFER_LAYOUT: gl.constexpr,
):  # fmt: skip
    """What `device.gate_up_backward` computes, for H a multiple of BK, and I of 64.

    FORM and PAIRED are 0 and 1, or 4 and 0: a gate times up, or a gate alone, both without a limit.

    Grid: (programs,) over tiles of BM = 128 rows and BN = 256 columns of h. Columns from I on are zeros,
    another expert's numbers or u: they are multiplied, and nothing is made of them.
    """
    gl.static_assert((FORM == 0 and PAIRED == 1) or (FORM == 4 and PAIRED == 0))
    dtype: gl.constexpr = w.dtype
    dout_slabs = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], SLAB_LAYOUT)
    w_slabs = gl.allocate_shared_memory(dtype, [STAGES, BK, BN] if TRANSPOSED else [STAGES, BN, BK], w.layout)
    buffers = gl.allocate_shared_memory(dtype, [5, BM, 64], BUFFER_LAYOUT)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(arrived.index(buffer), count=1)
    full, empty = pipeline(STAGES, 129, 1)
    gl.warp_specialize([
        (_multiply, (products, gradients, h, gradients_pointer, h_pointer, partial, pairs, weights, num_pairs,
                     tiles, max_tiles, inner, columns, dout_slabs, w_slabs, full, empty,
                     buffers, arrived, BM, BN, BK, STAGES, GROUP, TRANSPOSED, PAIRED, FORM, ACTIVATION)),
        (_load, (dout, w, tokens, tiles, max_tiles, inner, columns, stride_dout_row, dout_slabs, w_slabs,
                 full, empty, BM, BN, BK, STAGES, GROUP, TRANSPOSED)),
    ], [4], [40])  # fmt: skip

"""Device code of the gradients of experts' weights in Gluon, for Hopper; `.gluon_products` launches it.

Backward: out_e = rows' wide over the rows of expert e, and its transpose if SWAPPED: dD_e or dU_e
Shapes: ``rows`` [T, A] are gathered, ``wide`` [R, B] are in experts' order; `.device` defines T, R, E and D,
`.gluon_device` slabs and stages. Sums are in float32.

Four warps load: gathered rows with cp.async, the others by descriptor. Two consumers of four warps multiply,
each 64 of the tile's 128 columns of ``rows`` times all 256 of ``wide``. They do not wait for each other, so
one writes its results while the other multiplies.
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

from veomni_hook.kernels.moe_experts.device import tile_at
from veomni_hook.kernels.moe_experts.gluon_device import barrier, halves, pipeline

__all__ = ["weight_gradient"]


@gluon.jit
def _load(
    rows, wide, tokens, experts, num_experts, a_tiles, b_tiles, a_columns, stride_row,
    row_slabs, wide_slabs, full, empty,
    BA: gl.constexpr, BB: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Fill the slabs of every tile. Rows past an expert's end are zeros in ``rows``, but not in ``wide``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    lane = gl.arange(0, BK, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, BA, layout=gl.SliceLayout(0, layout))
    per_expert = a_tiles * b_tiles
    slab = 0
    for index in range(gl.program_id(0), num_experts * per_expert, gl.num_programs(0)):
        place = experts + index // per_expert
        a, b = tile_at(index % per_expert, a_tiles, b_tiles, GROUP)
        begin = gl.load(place + num_experts)
        end = gl.load(place + 2 * num_experts)
        pointers = rows + a * BA + column[None, :]
        token = gl.load(tokens + begin + lane, mask=begin + lane < end, other=0)
        ahead = gl.load(tokens + begin + BK + lane, mask=begin + BK + lane < end, other=0)
        for k in range(begin, end, BK):
            stage = slab % STAGES
            mbarrier.wait(empty.index(stage), ((slab // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BK * BB * 2)
            tma.async_copy_global_to_shared(wide, [k, b * BB], full.index(stage), wide_slabs.index(stage))
            mask = (k + lane < end)[:, None]
            if not EVEN:
                mask = mask & (column < a_columns - a * BA)[None, :]
            async_copy.async_copy_global_to_shared(
                row_slabs.index(stage), pointers + token.to(gl.int64)[:, None] * stride_row, mask=mask
            )
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            # Two slabs ahead: a load takes as long as the product of a slab.
            token = ahead
            ahead = gl.load(tokens + k + 2 * BK + lane, mask=k + 2 * BK + lane < end, other=0)
            slab += 1


@gluon.jit
def _zero_rows(slab, first, BK: gl.constexpr, BB: gl.constexpr, dtype: gl.constexpr):
    """Zero the rows of a slab from ``first`` on. Both consumers do it, and write the same numbers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BK, layout=gl.SliceLayout(1, layout))
    for part in gl.static_range(BB // 64):
        columns = slab.slice(part * 64, 64, dim=1)
        numbers = columns.load(layout)
        columns.store(gl.where((row < first)[:, None], numbers, gl.zeros([BK, 64], dtype, layout)))


@gluon.jit
def _write(out, staged, part, expert, a, b, dtype: gl.constexpr, SWAPPED: gl.constexpr):
    """Write [64, 64] through a buffer, which nothing but the store before the last one has used."""
    tma.store_wait(1)
    barrier()
    if SWAPPED:
        staged.permute((1, 0)).store(part.to(dtype))
    else:
        staged.store(part.to(dtype))
    fence_async_shared()
    barrier()
    if SWAPPED:
        tma.async_copy_shared_to_global(out, [expert, b, a], staged)
    else:
        tma.async_copy_shared_to_global(out, [expert, a, b], staged)


@gluon.jit
def _multiply(
    out, experts, num_experts, a_tiles, b_tiles, row_slabs, wide_slabs, full, empty, staged,
    CONSUMER: gl.constexpr, BA: gl.constexpr, BB: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SWAPPED: gl.constexpr,
):  # fmt: skip
    """The sums of one consumer's 64 columns of ``rows``."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BB, 16])
    dtype: gl.constexpr = out.dtype
    per_expert = a_tiles * b_tiles
    slab = 0
    for index in range(gl.program_id(0), num_experts * per_expert, gl.num_programs(0)):
        place = experts + index // per_expert
        expert = gl.load(place)
        a, b = tile_at(index % per_expert, a_tiles, b_tiles, GROUP)
        begin = gl.load(place + num_experts)
        end = gl.load(place + 2 * num_experts)
        whole = (end - begin) // BK
        acc = warpgroup_mma_init(gl.zeros([64, BB], gl.float32, layout))
        for k in range(0, whole):
            stage = slab % STAGES
            mbarrier.wait(full.index(stage), (slab // STAGES) & 1)
            # The product reads what cp.async has written as the other proxy.
            fence_async_shared()
            mine = row_slabs.index(stage).slice(CONSUMER * 64, 64, dim=1).permute((1, 0))
            acc = warpgroup_mma(mine, wide_slabs.index(stage), acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            # The product before this one is done.
            mbarrier.arrive(empty.index((slab + STAGES - 1) % STAGES), pred=k > 0)
            slab += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((slab + STAGES - 1) % STAGES), pred=whole > 0)
        left = end - begin - whole * BK
        if left > 0:
            stage = slab % STAGES
            mbarrier.wait(full.index(stage), (slab // STAGES) & 1)
            # Another expert's rows, or garbage: zeros times nan would be nan.
            _zero_rows(wide_slabs.index(stage), left, BK, BB, dtype)
            fence_async_shared()
            barrier()
            mine = row_slabs.index(stage).slice(CONSUMER * 64, 64, dim=1).permute((1, 0))
            last = warpgroup_mma(mine, wide_slabs.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(last,))
            mbarrier.arrive(empty.index(stage))
            slab += 1
        first, second = halves(acc, 64, BB)
        part_0, part_1 = halves(first, 64, BB // 2)
        part_2, part_3 = halves(second, 64, BB // 2)
        column = a * BA + CONSUMER * 64
        even, odd = staged.index(2 * CONSUMER), staged.index(2 * CONSUMER + 1)
        _write(out, even, part_0, expert, column, b * BB, dtype, SWAPPED)
        _write(out, odd, part_1, expert, column, b * BB + 64, dtype, SWAPPED)
        _write(out, even, part_2, expert, column, b * BB + 128, dtype, SWAPPED)
        _write(out, odd, part_3, expert, column, b * BB + 192, dtype, SWAPPED)
    tma.store_wait(0)


@gluon.jit
def weight_gradient(
    rows,  # [T, A], D: gathered
    wide,  # a descriptor of [R, B], D
    out,  # a descriptor of [E, A, B], or [E, B, A] if SWAPPED, D: written
    tokens,  # [R], int32: the token of a row
    experts,  # [4 E], int32: expert, first row, end and first tile of each, those with most rows first
    num_experts, a_columns, b_columns,  # E, A, B
    stride_row,
    BA: gl.constexpr, BB: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SWAPPED: gl.constexpr, EVEN: gl.constexpr, ROW_LAYOUT: gl.constexpr, STAGED_LAYOUT: gl.constexpr,
):  # fmt: skip
    """out_e = rows' wide over the rows of expert e, or its transpose; 0 without rows.

    Grid: (programs,) over experts and tiles of BA = 128 by BB = 256 columns; BK is the number of rows at
    once. EVEN: A is a multiple of BA. Descriptors read zeros past an operand's end, and do not write there.
    """
    dtype: gl.constexpr = wide.dtype
    row_slabs = gl.allocate_shared_memory(dtype, [STAGES, BK, BA], ROW_LAYOUT)
    wide_slabs = gl.allocate_shared_memory(dtype, [STAGES, BK, BB], wide.layout)
    staged = gl.allocate_shared_memory(dtype, [4, 64, 64], STAGED_LAYOUT)
    full, empty = pipeline(STAGES, 129, 2)
    a_tiles = gl.cdiv(a_columns, BA)
    b_tiles = gl.cdiv(b_columns, BB)
    # Tokens of two slabs in 56 registers, as loading warps had, cost up to a fifth.
    gl.warp_specialize([
        (_multiply, (out, experts, num_experts, a_tiles, b_tiles, row_slabs, wide_slabs, full, empty, staged,
                     0, BA, BB, BK, STAGES, GROUP, SWAPPED)),
        (_multiply, (out, experts, num_experts, a_tiles, b_tiles, row_slabs, wide_slabs, full, empty, staged,
                     1, BA, BB, BK, STAGES, GROUP, SWAPPED)),
        (_load, (rows, wide, tokens, experts, num_experts, a_tiles, b_tiles, a_columns, stride_row,
                 row_slabs, wide_slabs, full, empty, BA, BB, BK, STAGES, GROUP, EVEN)),
    ], [4, 4], [216, 72])  # fmt: skip

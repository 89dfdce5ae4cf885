"""Device code that experts' Gluon kernels share: pipelines through shared memory, and parts of a tile.

`.gluon_weight_gradient_device` and `.gluon_backward_device` use it; `.gluon_products` launches them, and
`.device` defines T, R, E and D. These kernels are for Hopper: some warps only load, others (consumers)
multiply, and both run at once.

A slab is BK of the numbers that a product sums over, of all rows and columns of its tile. STAGES slabs of
each operand fit into shared memory. ``full[stage]`` is complete when both operands' slabs are there: it
counts bytes that hardware copies by descriptor, and one arrival of each loading thread for gathered rows.
``empty[stage]`` counts one arrival of each consumer. Slabs are numbered over all tiles of a program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

__all__ = ["barrier", "halves", "pipeline"]

#: Waits for the other threads of a partition; named differently since Triton 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def pipeline(STAGES: gl.constexpr, ARRIVALS: gl.constexpr, CONSUMERS: gl.constexpr):
    """The barriers ``full`` and ``empty``; ``ARRIVALS`` complete a full one."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    # Descriptors' loads count bytes in these barriers as the other proxy.
    fence_async_shared()
    return full, empty


@gluon.jit
def halves(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The left and the right half of a tile in registers; no number changes its thread."""
    return gl.split(gl.permute(gl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))

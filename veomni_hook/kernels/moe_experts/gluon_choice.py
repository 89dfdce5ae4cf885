"""Decides where Gluon's kernels for Hopper compute a piece of experts' backward, and where Triton's do.

Gluon is experimental: its names and meanings change from one release of Triton to the next. So a release
counts only if the kernels were compiled with it; nothing is tried at run time.

On an H200, prototypes of these kernels took at most as long as Triton's at four shapes, and up to 32 % less
(16,384 x 2,048 x 768, 128 experts, top 8: dU 1.72 to 1.44 ms, dD 0.80 to 0.77); dD took 1 % longer where one
expert has an eighth of all rows, and dU 12 % less. Since loading warps know tokens two slabs ahead, dU and dD
gain 4 to 25 % at 128 experts of 2,048 x 768 with 512 to 2,048 rows each, and -3 to 10 % at 64 of 7,168 x
2,048, 32 of 2,880 x 2,880 and 512 of 2,048 x 512; knowing them four ahead gained nothing. Gradients of gate
and up took 1.12 ms in Triton, 0.94 with an epilogue of the multiplying warps, 0.83 with warps of its own.
Gluon's forward products and rows of dx gained nothing: at its power limit, a GPU lowers its clock as much as
waiting becomes less (docs/maintain/performance.md).
"""

from __future__ import annotations

from functools import cache

import torch
import triton

from veomni_hook.accelerator import is_rocm
from veomni_hook.kernels.moe_experts import triton_tiles
from veomni_hook.kernels.moe_experts.triton_routing import Routing

__all__ = ["RELEASES", "SHARED_MEMORY", "gate_up_backward_refuses", "weight_gradient_refuses"]

Tensor = torch.Tensor

#: Triton's releases with which the kernels were compiled, for the same instructions; they ran with 3.6.
RELEASES = frozenset({(3, 6), (3, 7)})
#: Bytes that the larger kernel takes.
SHARED_MEMORY = 229_608
#: Rows of an expert, on average, from which on there are measurements: from 65, see `triton_tiles.row_block`.
_ROWS = 128
_FEW = "experts have few rows"
_16_BITS = (torch.bfloat16, torch.float16)
_DEPTH = 64
#: What the kernel knows of the device code's numbers: a gate times up, all gates before all ups, or a gate
#: alone.
_FORMS = ((0, 1), (4, 0))


@cache
def _release_refuses() -> str | None:
    major, minor = triton.__version__.split(".")[:2]
    if (int(major), int(minor)) not in RELEASES:
        return f"Triton {triton.__version__} has another Gluon"
    return None


def _device_refuses(x: Tensor) -> str | None:
    """Return why the device of ``x`` cannot run Gluon's kernels for Hopper, or None."""
    if not x.is_cuda or is_rocm():
        return f"a {'GPU of ROCm' if x.is_cuda else x.device.type} is not an NVIDIA GPU"
    if triton.knobs.runtime.interpret:
        return "Gluon has no interpreter"
    return _gpu_refuses(x.device.index)


@cache
def _gpu_refuses(device_index: int) -> str | None:
    capability = torch.cuda.get_device_capability(device_index)
    if capability != (9, 0):
        return f"the GPU is not a Hopper: its compute capability is {capability[0]}.{capability[1]}"
    if triton_tiles.shared_memory(device_index) < SHARED_MEMORY:
        return f"{triton_tiles.shared_memory(device_index)} bytes of shared memory do not hold the slabs"
    return None


def _refuses(*operands: Tensor) -> str | None:
    """Return why the platform, a dtype or an address is unsuited, or None."""
    reason = _release_refuses() or _device_refuses(operands[0])
    if reason is not None:
        return reason
    dtype = operands[0].dtype
    for operand in operands:
        if operand.dtype is not dtype or dtype not in _16_BITS:
            return f"operands have the dtypes {dtype} and {operand.dtype}"
        # Descriptors, and Triton's proof that cp.async may copy 16 bytes.
        if (
            operand.data_ptr() % 16
            or operand.stride(-1) != 1
            or any(stride % 16 for stride in operand.stride()[:-1])
        ):
            return "an operand's rows are not aligned"
    return None


def weight_gradient_refuses(
    left: Tensor, right: Tensor, routing: Routing, gathered: tuple[bool, bool], dtype: torch.dtype
) -> str | None:
    """Return why Triton's kernel computes this weight's gradient, or None if Gluon's does.

    The arguments are those of `triton_products.weight_gradient`.
    """
    if routing.block != _ROWS:
        return _FEW
    if gathered[0] == gathered[1]:
        return "rows are in order"
    if dtype is not left.dtype:
        return f"the gradient is in {dtype}, the products in {left.dtype}"
    if left.shape[1] % 16 or right.shape[1] % 16:
        return f"{left.shape[1]} or {right.shape[1]} columns are no multiple of 16"
    return _refuses(left, right)


def gate_up_backward_refuses(
    dout: Tensor, weight: Tensor, products: Tensor, routing: Routing, *, form: int, paired: int
) -> str | None:
    """Return why Triton's kernel computes the gradients of gate and up, or None if Gluon's does.

    The arguments are those of `triton_products.gate_up_backward`, and two of the device code's numbers.
    """
    if routing.block != _ROWS:
        return _FEW
    if (form, paired) not in _FORMS:
        return "gates have a limit, or alternate with ups"
    if dout.dtype is not torch.bfloat16:
        return f"in {dout.dtype}, a gradient without its routing weight may be too large"
    columns = products.shape[1] // (1 + paired)
    if dout.shape[1] % _DEPTH or columns % _DEPTH:
        return f"{dout.shape[1]} or {columns} is no multiple of {_DEPTH}"
    if weight.stride(0) != weight.shape[1] * weight.stride(1):
        return "experts' weights stand apart"
    return _refuses(dout, weight, products)

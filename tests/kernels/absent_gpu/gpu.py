"""A GPU that is not there, to this process: launches compile for it, and run nothing."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.absent_gpu.registers import unwritten
from veomni_hook.kernels.shared import launch


class GPU(NamedTuple):
    """What kernels ask of a device.

    Attributes:
        capability: major and minor, in one number.
        shared: the bytes of shared memory that a program may have.
        processors: how many programs run at once.
    """

    capability: int
    shared: int
    processors: int


#: By CUDA's programming guide, appendix on compute capabilities: the most and the least of each generation.
GPUS = {
    "sm80": GPU(80, 163 << 10, 108),
    "sm86": GPU(86, 99 << 10, 84),
    "sm90": GPU(90, 227 << 10, 132),
    "sm100": GPU(100, 227 << 10, 148),
    "sm120": GPU(120, 99 << 10, 188),
}
_HOPPER = GPUS["sm90"].capability


class Compiled(NamedTuple):
    """A kernel as a launch would have had it compiled.

    Attributes:
        name: of its function.
        shared: the bytes of shared memory that it takes.
        unwritten: instructions that read a uniform register which nothing has written, if looked for.
        mx: whether it multiplies in MX, by the GPU's own instructions.
        contracted: whether a product and a sum in 16 bits are one operation, which rounds once.
    """

    name: str
    shared: int
    unwritten: list[str]
    mx: bool
    contracted: bool


class _Driver:
    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._gpu.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def pretend(gpu: GPU) -> list[Compiled]:
    """Make this process compile for ``gpu`` for good; the list grows by what every launch compiled.

    Operands are tensors of the CPU, which nothing is written to: what is computed from them is arbitrary.
    """
    driver.set_active(_Driver(gpu))
    launch._HANDLES = False  # what was compiled is not launched again without a look
    found: list[Compiled] = []
    run = JITFunction.run

    def compiled(self: Any, *operands: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *operands, grid=grid, warmup=True, **options)
        # Of other generations the instructions are not known here.
        wrong = unwritten(kernel.asm["cubin"]) if gpu.capability == _HOPPER else []
        by_scales = "mxf8f6f4.block_scale" in kernel.asm["ptx"]
        # Before Hopper, bfloat16 has no other instruction: a product is one with zero added.
        numbers = "b?f16" if gpu.capability >= _HOPPER else "f16"
        contracted = re.search(rf"fma\.rn\.{numbers}", kernel.asm["ptx"]) is not None
        found.append(Compiled(self.__name__, kernel.metadata.shared, wrong, by_scales, contracted))
        return kernel

    JITFunction.run = compiled
    _answer_for(gpu)
    return found


def _answer_for(gpu: GPU) -> None:
    """Replace what asks for the properties of a tensor's device."""
    from veomni_hook.kernels.moe_experts import triton_adapters, triton_products, triton_tiles
    from veomni_hook.kernels.rms_norm import tiles

    replaced: list[tuple[Any, Any]] = [
        (launch.room, lambda _: (gpu.processors, gpu.shared)),
        (launch.generation, lambda _: gpu.capability // 10),
        (triton_tiles._hopper, lambda _: gpu.capability // 10 == 9),
        (tiles.fetches, lambda _: True),
        (triton_tiles._roomy, lambda _: gpu.shared >= triton_tiles._WIDE_BYTES),
        # By the numbers of a routing, which nothing has written.
        (triton_products.ordered, lambda x, routing: x.new_zeros(routing.num_pairs, x.shape[1])),
        (triton_adapters.weighted_rows, lambda x, routing, weights: x),
    ]
    if gpu.capability < 90:
        replaced.append((triton_tiles.describable, lambda *_: False))
    for module in [each for name, each in sys.modules.items() if name.startswith("veomni_hook.kernels")]:
        for name, value in list(vars(module).items()):
            for old, new in replaced:
                if value is old:
                    setattr(module, name, new)

"""Launches of Triton functions that do not inspect every argument again.

At each launch, ``function[grid](...)`` determines for every argument what Triton has to compile. If this is
known beforehand, the compiled handle is launched directly. Such a handle still looks up the device, calls two
hooks, and asks the driver where each tensor is. So where its launcher has the expected form, the launcher's C
function is called with addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from copy import copy
from functools import cache, lru_cache, reduce
from operator import or_
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch._functorch.utils import unwrap_dead_wrappers

from veomni_hook.accelerator import is_rocm

__all__ = [
    "LAUNCHES",
    "STEPS",
    "TL",
    "TRITON",
    "Launch",
    "cdiv",
    "enter_context",
    "generation",
    "launch_of",
    "power",
    "room",
]

#: Triton's release, two numbers.
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
#: Triton's names of the dtypes that kernels take.
TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
#: Releases whose handles take all arguments in order, including constants; others use the normal launch.
_HANDLES = (3, 3) <= TRITON <= (3, 9)
_ALIGNED = 16
#: Options of kernels that round after every step, as upstream's operators do: else LLVM makes of a rounded
#: product and the sum behind it one operation in 16 bits, which rounds once.
STEPS = {"enable_fp_fusion": False}
#: How many kinds of calls a launch cache keeps; kinds include shapes and strides, but not row counts.
LAUNCHES = 4096


def cdiv(number: int, size: int) -> int:
    """Return how many blocks of ``size`` cover ``number``; Triton's own, made for device code, takes 9 us."""
    return -(-number // size)


def power(number: int) -> int:
    """Return the smallest power of two that is not less; 1 for zero."""
    return 1 << max(number - 1, 0).bit_length()


@cache
def room(device: torch.device) -> tuple[int, int]:
    """The number of concurrent programs, one per multiprocessor, and the bytes that each may stage."""
    if device.type != "cuda":
        return 4, 1 << 16  # the interpreter
    properties = torch.cuda.get_device_properties(device)
    memory = int(getattr(properties, "shared_memory_per_block_optin", 1 << 16))
    return properties.multi_processor_count, memory


@cache
def generation(device: torch.device) -> int:
    """The generation of an NVIDIA GPU (9: Hopper, 10: Blackwell in data centres); 0 for other devices."""
    if device.type != "cuda" or is_rocm():
        return 0  # the numbers of AMD's GPUs mean others
    return torch.cuda.get_device_capability(device)[0]


class _Thread(threading.local):
    """Whether the device's context is known to be current in this thread."""

    entered = False


_THREAD = _Thread()


def enter_context(x: torch.Tensor) -> None:
    """Make the context of the current device current in this thread, before a launch with descriptors.

    torch's operators do that, and so does Triton when it loads or launches a kernel, but it makes descriptors
    before it launches. Without a context that fails ("invalid device context"): in autograd's thread, if
    nothing was allocated or launched there before, and the kernel was loaded by another thread.
    """
    if not _THREAD.entered and x.is_cuda:
        # Neither waits nor allocates, and may be captured in a graph.
        event: Any = torch.cuda.Event
        event().record()
        _THREAD.entered = True


#: Where profilers set hooks that are called at every launch.
_HOOKS: Any = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel
_CHAIN: Any = getattr(getattr(triton, "knobs", None), "HookChain", None)
_data_ptr = torch.Tensor.data_ptr
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_device: Any = getattr(torch._C, "_cuda_getDevice", None)


class _Raw(NamedTuple):
    """A launcher's C function, and what it gets after grid and stream: ``function``, ``fixed``, arguments.

    ``together``: the kernel's arguments are one tuple, as from Triton 3.7 on.
    """

    launch: Any
    device: int
    function: Any
    fixed: tuple[Any, ...]
    together: bool


class Launch:
    """A Triton function for one kind of arguments, on one device; constants and options are fixed.

    The kind is everything that Triton specialises on: the dtypes of tensors and the values of numbers. For
    floats, and for numbers that the function is told not to specialise on, only the size counts (32 or 64
    bits). Callers must ensure that the kind matches, and that the device is the current one. Alignment is
    checked here: it varies within a kind.

    Args:
        function: the result of ``triton.jit``.
        tensors: the number of tensor arguments; they come first.
        constants: the last arguments, all ``tl.constexpr``.
        options: compiler options, such as ``num_warps``.
    """

    __slots__ = ("_compiled", "_constants", "_function", "_options", "_raw", "_tensors")

    def __init__(self, function: Any, tensors: int, *constants: Any, **options: Any) -> None:
        self._function = function
        self._tensors = tensors
        self._constants = constants
        self._options = options
        self._compiled: Any = None
        self._raw: _Raw | None = None

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch the function on the current device and stream."""
        tensors = self._tensors
        try:
            pointers = [*map(_data_ptr, arguments[:tensors])]
        except RuntimeError:  # a tensor that left a transform of `torch.func`
            arguments = unwrap_dead_wrappers(arguments)
            pointers = [*map(_data_ptr, arguments[:tensors])]
        aligned = not reduce(or_, pointers) % _ALIGNED
        if aligned and self._compiled is not None:
            if self._raw is None or _observed():
                self._compiled[grid](*arguments, *self._constants)
                return
            launch, device, function, fixed, together = self._raw
            stream = _stream(device)
            if together:
                own = *pointers, *arguments[tensors:], *self._constants
                launch(*grid, stream, function, *fixed, own)
            else:
                launch(
                    *grid, stream, function, *fixed, *pointers, *arguments[tensors:], *self._constants
                )  # fmt: skip
            return
        compiled = self._function[grid](*arguments, *self._constants, **self._options)
        if aligned and _HANDLES:
            self._compiled = compiled  # None in the interpreter
            self._raw = _raw_launch(compiled, len(arguments) + len(self._constants))


@lru_cache(maxsize=LAUNCHES)
def launch_of(kind: Hashable, function: Any, tensors: int, *constants: Any, **options: Any) -> Launch:
    """Return the `Launch` for a kind of arguments: plans of calls of other sizes share it.

    ``kind`` is what Triton specialises on besides the constants: the device, dtypes (of results, too),
    strides, and whether numbers of rows fit into 32 bits.
    """
    return Launch(function, tensors, *constants, **options)


def _observed() -> bool:
    """Return whether a profiler has asked Triton to call it at every launch."""
    # Some releases have one function or None, others a chain of functions.
    before, after = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
    if type(before) is type(after) is _CHAIN:
        return bool(before.calls or after.calls)
    return any(hook is not None and (type(hook) is not _CHAIN or hook.calls) for hook in (before, after))


class _Mark:
    """Stands for an argument while a launcher shows in which order it passes them on."""


def _raw_launch(compiled: Any, count: int) -> _Raw | None:
    """Return how to launch a handle that takes ``count`` arguments without its Python code, or None.

    Nothing is launched here. Which arguments a launcher adds differs between releases, so a copy of it is
    called with marks, and must pass them on in the expected order.
    """
    launcher: Any = getattr(compiled, "run", None)
    launch = getattr(launcher, "launch", None)
    if type(launch) is not BuiltinFunctionType or is_rocm() or _stream is None:
        return None
    if any(getattr(launcher, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
        return None  # memory that is allocated at every launch
    passed: list[tuple[Any, ...]] = []
    probe = copy(launcher)
    probe.launch = lambda *them: passed.append(them)
    head = 1, 1, 1, _Mark(), _Mark()
    # The metadata of the function and of the launch, and two hooks, which `_observed` checks.
    middle = tuple(_Mark() for _ in range(4))
    own = tuple(_Mark() for _ in range(count))
    probe(*head, *middle, *own)
    (them,) = passed
    together = them[-1:] == (own,)
    last = (own,) if together else own
    between = them[len(head) : len(them) - len(last)]
    marks = tuple(value for value in between if type(value) is _Mark)
    added = [value for value in between if type(value) is not _Mark]
    # Together, the launcher's own description of the arguments comes before them.
    same = them == (*head, *between, *last) and marks == middle
    if not same or not (together or all(value is None or isinstance(value, int) for value in added)):
        return None
    metadata = {middle[0]: compiled.packed_metadata}
    fixed = tuple(metadata.get(value) if type(value) is _Mark else value for value in between)
    return _Raw(launch, _device(), compiled.function, fixed, together)

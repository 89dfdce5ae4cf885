"""Launches of Triton functions that do not inspect every argument again.

At each launch, ``function[grid](...)`` determines for every argument what Triton has to compile. If this is
known beforehand, the compiled handle is launched directly.
"""

from __future__ import annotations

from typing import Any

import triton

__all__ = ["LAUNCHES", "Launch", "cdiv", "power"]

#: Releases whose handles take all arguments in order, including constants; others use the normal launch.
_HANDLES = (3, 3) <= tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
_ALIGNED = 16
#: How many kinds of calls a launch cache keeps; kinds include shapes and strides, but not row counts.
LAUNCHES = 4096


def cdiv(number: int, size: int) -> int:
    """Return how many blocks of ``size`` cover ``number``; Triton's own, made for device code, takes 9 us."""
    return -(-number // size)


def power(number: int) -> int:
    """Return the smallest power of two that is not less; 1 for zero."""
    return 1 << max(number - 1, 0).bit_length()


class Launch:
    """A Triton function for one kind of arguments, on one device; constants and options are fixed.

    The kind is everything that Triton specialises on: the dtypes of tensors and the values of numbers. For
    floats, and for numbers that the function is told not to specialise on, only the size counts (32 or 64
    bits). Callers must ensure that the kind matches. Alignment is checked here: it varies within a kind.

    Args:
        function: the result of ``triton.jit``.
        tensors: the number of tensor arguments; they come first.
        constants: the last arguments, all ``tl.constexpr``.
        options: compiler options, such as ``num_warps``.
    """

    __slots__ = ("_compiled", "_constants", "_function", "_options", "_tensors")

    def __init__(self, function: Any, tensors: int, *constants: Any, **options: Any) -> None:
        self._function = function
        self._tensors = tensors
        self._constants = constants
        self._options = options
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch the function on the current device and stream."""
        aligned = True
        for tensor in arguments[: self._tensors]:
            if tensor.data_ptr() % _ALIGNED:
                aligned = False
        if aligned and self._compiled is not None:
            self._compiled[grid](*arguments, *self._constants)
            return
        compiled = self._function[grid](*arguments, *self._constants, **self._options)
        if aligned and _HANDLES:
            self._compiled = compiled  # None in the interpreter

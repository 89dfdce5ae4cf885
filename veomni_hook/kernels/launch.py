"""Launches of Triton functions that need not look at every argument again.

``function[grid](...)`` finds out for each argument of each launch what Triton would compile for it. Where
that is known beforehand, the handle of what was compiled is launched directly.
"""

from __future__ import annotations

from typing import Any

import triton

__all__ = ["LAUNCHES", "Launch", "cdiv", "power"]

#: Releases whose handles take all arguments in order, constants too; others go the general way.
_HANDLES = (3, 3) <= tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
_ALIGNED = 16
#: How many kinds of calls a cache of launches keeps: shapes and strides, but not numbers of rows.
LAUNCHES = 4096


def cdiv(number: int, size: int) -> int:
    """How many pieces of ``size`` hold ``number``. Triton's own takes 9 us: it serves device code, too."""
    return -(-number // size)


def power(number: int) -> int:
    """The least power of two that is not less; 1 for nothing."""
    return 1 << max(number - 1, 0).bit_length()


class Launch:
    """A Triton function for arguments of one kind, on one device; constants and options are fixed.

    The kind is all that Triton compiles for: the dtypes of tensors, and the values of numbers, except floats
    and what the function is told not to specialise by, of which only the size counts (32 or 64 bits). Whoever
    calls it sees to that. Alignment is looked at here, since it is of each tensor and not of its kind.

    Args:
        function: what ``triton.jit`` made.
        tensors: how many arguments are tensors; they come first.
        constants: the last arguments, all ``tl.constexpr``.
        options: of the compiler, such as ``num_warps``.
    """

    __slots__ = ("_compiled", "_constants", "_function", "_options", "_tensors")

    def __init__(self, function: Any, tensors: int, *constants: Any, **options: Any) -> None:
        self._function = function
        self._tensors = tensors
        self._constants = constants
        self._options = options
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch it on the current device and stream."""
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

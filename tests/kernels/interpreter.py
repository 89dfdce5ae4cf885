"""Triton's interpreter at half its price, and what it does not see: launches whose arguments change their kind.

What it does over and over again for every call is done once. Of the time of a kernel in it, 29 % went into patching `triton.language` anew for every device function that a
kernel calls, 22 % into a second computation of integers in 64 bits to see whether they overflow, 7 % into a table
of dtypes. Results are the same. Overflows are still looked for by the slow tests.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any


@cache
def hasten(*, look_for_overflows: bool) -> None:
    """Change the interpreter of this process, if it is one that these changes are for."""
    try:
        from triton import language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    if not look_for_overflows and hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        object.__setattr__(builder.options, "sanitize_overflow", False)
    if hasattr(interpreter, "_LangPatchScope"):
        _patch_languages_once(interpreter, tl)
    if hasattr(interpreter, "_get_np_dtype"):
        _keep_dtypes(interpreter)
    if hasattr(builder, "create_masked_load"):
        _keep_masks(type(builder))
    if builder is not None and not hasattr(builder, "create_dot_scaled"):
        type(builder).create_dot_scaled = _dot_scaled
        _take_names(type(interpreter.interpreter_semantic), tl.constexpr)


@cache
def check_launches() -> None:
    """Make every `Launch` of this process assert that its arguments are of one kind: compiled code is for one."""
    try:
        from veomni_hook.kernels.shared.launch import Launch
    except ImportError:
        return
    launch, kinds = Launch.__call__, {}

    @wraps(launch)
    def checked(self: Any, grid: Any, *arguments: Any) -> None:
        if hasattr(self._function, "arg_names"):  # no double
            kind = [_kind(self._function, *pair) for pair in enumerate(arguments)]
            assert kinds.setdefault(self, kind) == kind, (
                f"{self._function.fn.__name__}: {kinds[self]}, then {kind}"
            )
        launch(self, grid, *arguments)

    Launch.__call__ = checked


def _kind(function: Any, index: int, argument: Any) -> object:
    """What Triton compiles an argument for."""
    if not isinstance(argument, int) or isinstance(argument, bool):
        return getattr(argument, "dtype", type(argument))
    general = function.kwargs.get("do_not_specialize") or ()
    size = -(2**31) <= argument < 2**31
    if index in general or function.arg_names[index] in general:
        return size
    return size, argument == 1, argument % 16 == 0


def _patch_languages_once(interpreter: Any, tl: Any) -> None:
    patch = interpreter._patch_lang

    def patch_lang(function: Any) -> Any:
        languages = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        # A device function's kernel has patched them already; what is patched is no builtin any more.
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patch_lang


def _keep_masks(builder: Any) -> None:
    """Truth values that Triton 3.9 spreads over a block become integers, which its loads and stores refuse."""
    splat = builder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        result = splat(self, kind, value)
        if value.data.dtype == bool:
            result.data = result.data.astype(bool)
        return result

    builder.create_splat = create_splat


def _take_names(semantic: Any, constant: Any) -> None:
    """Formats are constants to the compiler, and names here."""
    multiply = semantic.dot_scaled

    def dot_scaled(self: Any, *operands: Any) -> Any:
        return multiply(self, *(constant(each) if isinstance(each, str) else each for each in operands))

    semantic.dot_scaled = dot_scaled


def _dot_scaled(
    self: Any, a: Any, a_scale: Any, _a_format: Any, b: Any, b_scale: Any, _b_format: Any, _fast_math: Any,
    _a_packed: Any, _b_packed: Any, acc: Any,
) -> Any:  # fmt: skip
    """The product of e4m3 with a scale, 2^(byte - 127), for 32 neighbours along the sum: Triton 3.6 has none."""
    import numpy as np
    import torch

    def values(operand: Any, scale: Any, axis: int) -> Any:
        numbers = torch.from_numpy(operand.data.view(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
        powers = np.where(scale.data == 255, np.nan, np.exp2(scale.data.astype(np.float64) - 127))
        return numbers * np.repeat(powers if axis else powers.T, 32, axis=axis)

    total = values(a, a_scale, 1) @ values(b, b_scale, 0)
    return type(acc)(acc.data + total.astype(acc.data.dtype), acc.dtype.scalar)


def _keep_dtypes(interpreter: Any) -> None:
    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        name = "pointer" if scalar.is_ptr() else scalar.name
        found = known.get(name)
        if found is None:
            found = known[name] = find(dtype)
        return found

    interpreter._get_np_dtype = numpy_dtype

"""Code objects: those that a module's text compiles to, and those that its classes run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from veomni_hook.kernels.standing import home_of, name_of

__all__ = ["code_like", "definition", "definitions", "replaced", "set_class_cell"]

#: Whose decorators stand above the methods of models as they are installed.
_DECORATORS = ("torch", "transformers")
_CLASS_CELL = "__class__"


def definitions(code: CodeType, inside: str = "") -> Iterator[tuple[str, CodeType]]:
    """Yield the qualified name and the code of the classes and functions in ``code``, nested ones too."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            place = f"{inside}{each.co_name}"
            yield place, each
            yield from definitions(each, f"{place}.")


def definition(code: CodeType | None, place: str) -> CodeType | None:
    """Return the code of a definition; None where there is none of that name, or several."""
    found = code
    for part in place.split("."):
        inner = () if found is None else found.co_consts
        named = [each for each in inner if isinstance(each, CodeType) and each.co_name == part]
        found = named[0] if len(named) == 1 else None
    return found


def code_like(written: CodeType, found: Any) -> CodeType | None:
    """Return the code object of ``found``, or of what it wraps, that equals ``written``; None: none does."""
    for function in _layers(found):
        if function.__code__ == written:
            return function.__code__
    return None


def replaced(written: CodeType | None, module: ModuleType, kind: type, members: tuple[str, ...]) -> str:
    """Return what stands in a class in the place of what its text says, for these members; empty: nothing."""
    for name in members:
        place = f"{kind.__qualname__}.{name}"
        code = definition(written, place)
        if code is None:
            continue  # the patches add it; or it is no method, or one that is defined twice, as setters are
        if name not in vars(kind):
            return f"{place} was taken away"
        reason = _covered(code, vars(kind)[name], module, place)
        if reason:
            return reason
    return ""


def _covered(code: CodeType, standing: Any, module: ModuleType, place: str) -> str:
    """Return why ``standing`` is not the function with this code below decorators of upstream's; or empty."""
    outer = standing
    for function in _layers(standing):
        if function.__code__ == code:
            return ""
        outer, home = function, home_of(function)
        if home == module.__name__ or home.partition(".")[0] not in _DECORATORS:
            break
    if name_of(outer) == f"{module.__name__}.{place}":
        return f"the file of {module.__name__} has changed since it was imported"
    return f"{place} was replaced by {name_of(outer)}"


def set_class_cell(made: type, body: CodeType | None, kind: type) -> bool:
    """Let ``super()`` without arguments in the methods of a class go on behind ``kind``.

    Returns:
        Whether that was done, or is not needed: no method, by the code of the class's body, calls it.
    """
    if body is None or _CLASS_CELL not in body.co_cellvars:
        return True
    for each in vars(made).values():
        for function in _layers(each):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if name == _CLASS_CELL:
                    cell.cell_contents = kind  # the methods of a class have it in common
                    return True
    return False


def _layers(found: Any) -> Iterator[FunctionType]:
    """A function, and what it wraps, from the outside in."""
    function, seen = _peeled(found), set[int]()
    while isinstance(function, FunctionType) and id(function) not in seen:
        seen.add(id(function))
        yield function
        function = _peeled(getattr(function, "__wrapped__", None) or _of_hub(function))


def _peeled(found: Any) -> Any:
    while True:
        if isinstance(found, (MethodType, staticmethod, classmethod)):
            found = found.__func__
        elif isinstance(found, partial):
            found = found.func
        elif isinstance(found, property):
            found = found.fget
        elif hasattr(type(found), "kernel_layer_name"):
            found = type(found).forward  # the package ``kernels`` has made a module of a function
        else:
            return found


def _of_hub(function: FunctionType) -> Any:
    """What the forward of a module that the package ``kernels`` has made of a function calls."""
    if hasattr(function, "kernel_layer_name") or function.__name__ != "forward":
        return None
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    inner = [each for each in held if isinstance(each, FunctionType)]
    return inner[0] if len(inner) == 1 and home_of(function).startswith("kernels.") else None


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is not bound yet
        return False

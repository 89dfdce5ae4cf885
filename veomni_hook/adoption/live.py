"""Code objects: those compiled from a module's source, and those that its classes run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from veomni_hook.kernels.shared.origin import home_of, name_of
from veomni_hook.kernels.slot.comparison import definition

__all__ = ["code_like", "definitions", "replaced", "set_class_cell"]

#: Packages whose decorators wrap methods in installed modeling code.
_DECORATORS = ("torch", "transformers")
_CLASS_CELL = "__class__"


def definitions(code: CodeType, inside: str = "") -> Iterator[tuple[str, CodeType]]:
    """Yield the qualified name and the code of the classes and functions in ``code``, nested ones too."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            place = f"{inside}{constant.co_name}"
            yield place, constant
            yield from definitions(constant, f"{place}.")


def code_like(written: CodeType, found: object) -> CodeType | None:
    """Return the code object of ``found``, or of what it wraps, that equals ``written``, or None."""
    for function in _layers(found):
        if function.__code__ == written:
            return function.__code__
    return None


def replaced(written: CodeType | None, module: ModuleType, kind: type, members: tuple[str, ...]) -> str:
    """Return what replaced one of these members of a class, compared with the source; empty if nothing."""
    for name in members:
        place = f"{kind.__qualname__}.{name}"
        code = definition(written, place)
        if code is None:
            continue  # added by the patches, not a method, or defined twice as setters are
        if name not in vars(kind):
            return f"{place} was deleted"
        reason = _covered(code, vars(kind)[name], module, place)
        if reason:
            return reason
    return ""


def _covered(code: CodeType, standing: object, module: ModuleType, place: str) -> str:
    """Return why ``standing`` is not, below upstream decorators, the function with this code; else empty."""
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


def set_class_cell(subclass: type, body: CodeType | None, kind: type) -> bool:
    """Make zero-argument ``super()`` in the methods of a class continue the lookup after ``kind``.

    Returns:
        Whether this was done, or is not needed because no method in the class's body calls it.
    """
    if body is None or _CLASS_CELL not in body.co_cellvars:
        return True
    for var in vars(subclass).values():
        for function in _layers(var):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if name == _CLASS_CELL:
                    cell.cell_contents = kind  # the methods of a class share one cell
                    return True
    return False


def _layers(found: object) -> Iterator[FunctionType]:
    """Yield a function and what it wraps, outermost first."""
    function, seen = _peeled(found), set[int]()
    while isinstance(function, FunctionType) and id(function) not in seen:
        seen.add(id(function))
        yield function
        function = _peeled(getattr(function, "__wrapped__", None) or _of_hub(function))


def _peeled(found: Any) -> object:
    while True:
        if isinstance(found, (MethodType, staticmethod, classmethod)):
            found = found.__func__
        elif isinstance(found, partial):
            found = found.func
        elif isinstance(found, property):
            found = found.fget
        elif hasattr(type(found), "kernel_layer_name"):
            found = type(found).forward  # the package ``kernels`` made a module of a function
        else:
            return found


def _of_hub(function: FunctionType) -> object:
    """Return the function that a ``kernels`` module, made of that function, calls in its forward, or None."""
    if hasattr(function, "kernel_layer_name") or function.__name__ != "forward":
        return None
    contents = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    inner = [content for content in contents if isinstance(content, FunctionType)]
    return inner[0] if len(inner) == 1 and home_of(function).startswith("kernels.") else None


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # unbound variable
        return False

"""What the classes of a loaded module run, compared with the code that was compiled from its source."""

from __future__ import annotations

from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType

from veomni_hook.kernels.shared.origin import home_of, name_of, underlying
from veomni_hook.kernels.slot.comparison import definition

__all__ = ["code_like", "replaced", "set_class_cell"]

#: Packages whose decorators wrap methods in installed modeling code.
_DECORATORS = ("torch", "transformers")
_CLASS_CELL = "__class__"


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


def _peeled(found: object) -> object:
    function = underlying(found)
    if isinstance(function, property):
        return _peeled(function.fget)
    if hasattr(type(function), "kernel_layer_name"):
        return _peeled(type(function).forward)  # the package ``kernels`` made a module of a function
    return function


def _of_hub(function: FunctionType) -> object:
    """Return the function that a ``kernels`` module, made of that function, calls in its forward, or None."""
    if hasattr(function, "kernel_layer_name") or function.__name__ != "forward":
        return None
    contents = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    inner = [content for content in contents if isinstance(content, FunctionType)]
    return inner[0] if len(inner) == 1 and home_of(function).startswith("kernels.") else None

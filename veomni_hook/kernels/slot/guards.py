"""The guards in a patched module, read from its source because its classes may have been changed since.

A class whose ``forward`` was replaced no longer names its slot. So the source shows what was patched, and the
class and the instance show what would run (`veomni_hook.kernels.explain.replacements`).
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from veomni_hook.kernels.slot.slot import Slot

__all__ = ["FORM", "Guard", "executed_source", "guards_in", "guards_of", "module_of", "slots_in"]

#: The attribute of a class that was made for loaded models (`veomni_hook.adoption`): a module with its
#: source.
FORM = "_veomni_form"


class Guard(NamedTuple):
    """One place in a module's source that asks a slot.

    Attributes:
        kind: the qualified name of the class.
        method: the method.
        name: the slot's name in the module.
        slot: the slot.
        function: the name of the module's function whose call is guarded (`Slot.at`); else empty.
    """

    kind: str
    method: str
    name: str
    slot: Slot
    function: str


_READ: WeakKeyDictionary[ModuleType, tuple[object, tuple[Guard, ...]]] = WeakKeyDictionary()


def slots_in(module: ModuleType) -> dict[str, Slot]:
    """Return the slots of a patched module by name; empty if it is not patched."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Slot)}


def module_of(kind: type) -> ModuleType | None:
    """Return the module that shows what was patched into a class; None if it is no longer loaded."""
    form: ModuleType | None = vars(kind).get(FORM)
    return sys.modules.get(kind.__module__) if form is None else form


def guards_in(module: ModuleType) -> tuple[Guard, ...]:
    """Return every guard in ``module``, in source order; empty if its source is no longer available."""
    # A module that is executed again has a new loader or the same source.
    loader = getattr(module, "__loader__", None)
    known = _READ.get(module)
    if known is None or known[0] is not loader:
        slots = slots_in(module)
        guards = tuple(_read(module, slots)) if slots else ()
        known = _READ[module] = (loader, guards)
    return known[1]


def guards_of(kind: type) -> Iterator[tuple[type, Guard]]:
    """Yield the guards in the sources of the module class ``kind``, each with the class that contains it."""
    for base in kind.__mro__:
        module = module_of(base)
        if module is not None and base.__module__ != "builtins":
            yield from ((base, one) for one in guards_in(module) if one.kind == base.__qualname__)


def _read(module: ModuleType, slots: Mapping[str, Slot]) -> Iterator[Guard]:
    source = executed_source(module)
    if source is None:
        return
    # Every patched module imports this one; few are ever parsed.
    from veomni_hook.patches.code.document import Document

    for definition in Document(source).definitions():
        method = definition.node
        if definition.kind == "method" and isinstance(method, ast.FunctionDef):
            kind = definition.qualname.removesuffix(f".{definition.accessor}").rpartition(".")[0]
            asked = dict.fromkeys(_asked(method, slots))
            yield from (Guard(kind, method.name, name, slots[name], at) for name, at in asked)


def executed_source(module: ModuleType) -> str | None:
    """Return the executed source; for remote code ``__file__`` would give the original."""
    read: Any = getattr(getattr(module, "__loader__", None), "get_source", None)
    if read is not None:
        return read(module.__name__)  # type: ignore[no-any-return]
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # a module without a file raises TypeError
        return None


def _asked(method: ast.FunctionDef, slots: Mapping[str, Slot]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(method):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        receiver, how = node.func.value, node.func.attr
        if isinstance(receiver, ast.Name) and receiver.id in slots and how in ("kernel", "at", "fuses"):
            callee = node.args[1] if how == "at" and len(node.args) > 1 else None
            yield receiver.id, callee.id if isinstance(callee, ast.Name) else ""

"""What a class inherits from classes of the same file, one base at a time."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.expressions import decorator_name
from veomni_hook.patches.code.statements import initialised
from veomni_hook.patches.graph import HARMLESS_DECORATORS
from veomni_hook.patches.reasons import Code, Reason
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["called_otherwise", "defining", "initialised_by", "linear_otherwise"]

_CALLING = {"__call__", "__getattribute__"}
_HARMLESS = frozenset(("__init__", "extra_repr", "reset_parameters"))


def initialised_by(view: ModuleView, owner: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """What ``__init__`` assigns; for a class without one, the inherited ``__init__``."""
    while "__init__" not in view.methods(owner):
        base = _base(view, owner)
        if base is None:
            return
        owner = base
    yield from initialised(owner)


def _base(view: ModuleView, owner: ast.ClassDef) -> ast.ClassDef | None:
    base = owner.bases[0] if len(owner.bases) == 1 else None
    found = view.classes.get(base.id) if isinstance(base, ast.Name) else None
    return found if found is not owner else None


def called_otherwise(view: ModuleView, name: str) -> str:
    """Why calling an instance may do more than ``forward``; empty if it does not."""
    owner: ast.ClassDef | None = view.classes[name]
    while owner is not None:
        methods = view.methods(owner)
        for special in _CALLING & methods.keys():
            return Reason(f"{owner.name} defines {special}", Code.REPLACED, methods[special].lineno)
        forward = methods.get("forward")
        for decorator in forward.decorator_list if forward is not None else ():
            if decorator_name(decorator) not in HARMLESS_DECORATORS:
                return Reason(
                    f"{owner.name}.forward is decorated with {ast.unparse(decorator)}", Code.DECORATED
                )
        owner = _base(view, owner) if forward is None else None
    return ""


def linear_otherwise(view: ModuleView, name: str) -> str:
    """The ``forward`` or ``__call__`` that a subclass of Linear overrides; empty if neither."""
    made = view.classes.get(name)
    classes = [each for each in view.scope.ancestors(made) if each is not None] if made is not None else []
    bases = {view.scope.dotted(base) for each in classes for base in each.bases}
    for each in classes if "torch.nn.Linear" in bases else ():
        for method in ("forward", "__call__"):
            if method in view.methods(each):
                return method
            if line := view.scope.replaced.line(f"{each.name}.{method}"):
                return f"{method} (set at line {line})"
    return ""


def defining(view: ModuleView, name: str) -> str:
    """The first class of the lineage that defines more than harmless methods, for example ``forward``."""
    owner: ast.ClassDef | None = view.classes[name]
    while owner is not None and view.methods(owner).keys() <= _HARMLESS:
        owner = _base(view, owner)
        name = owner.name if owner is not None else name
    return name

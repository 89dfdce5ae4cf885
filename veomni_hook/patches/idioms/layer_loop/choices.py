"""Which module an attribute is, in a branch on the setting that chose it.

    self.mixer = Attention(config) if config.layer_types[index] == "full_attention" else Recurrence(config)
    self.kind = config.layer_types[index]

Where ``forward`` then asks for ``self.kind``, the mixer has one class. A setting has one of the values that
the class names: upstream's models have a mask for these alone, and fail with others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import own_names, parameter_names
from veomni_hook.patches.code.tree import own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.modules import Attributes, lineage
from veomni_hook.patches.idioms.layer_loop.values import Value

__all__ = ["chosen"]

_PURE = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context)


def chosen(
    attributes: Attributes, owner: str, test: ast.expr, *, outcome: bool
) -> Iterator[tuple[str, Value]]:
    """The attributes of an instance of ``owner`` that a condition decides, in the branch for ``outcome``.

    Yields:
        the name of each, and what it is there.
    """
    asked = _compared(test)
    attribute = own_attribute(asked[0]) if asked is not None else ""
    inits = [found for each in lineage(attributes.view, owner) if (found := _init(attributes, each))]
    if asked is None or not attribute or len(inits) != 1:
        return
    (init,) = inits
    _, value, equal = asked
    assigned = _assigned_once(attributes, owner, init)
    if attribute not in assigned or not _is_given(assigned[attribute], init):
        return
    setting = {ast.dump(assigned[attribute]), ast.dump(asked[0])}
    for name, choice in assigned.items():
        modules = _by_value(choice, setting)
        if modules:
            values = {value} if equal is outcome else {*modules, value} - {value, None}
            # A value that the choice does not name takes what is left.
            wanted = dict.fromkeys(modules.get(each, modules[None]) for each in sorted(filter(None, values)))
            if wanted:
                yield name, attributes.one_of(init, list(wanted))


def _init(attributes: Attributes, owner: ast.ClassDef) -> FunctionNode | None:
    return attributes.view.methods(owner).get("__init__")


def _compared(test: ast.expr) -> tuple[ast.expr, str, bool] | None:
    """What a condition compares with which text, and whether it holds if they are equal."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.NotEq):
        other = test.comparators[0]
        if isinstance(other, ast.Constant) and isinstance(other.value, str):
            return test.left, other.value, isinstance(test.ops[0], ast.Eq)
    return None


def _assigned_once(attributes: Attributes, owner: str, init: FunctionNode) -> dict[str, ast.expr]:
    """The attributes that one statement of a class and of those above it assigns: the one in ``__init__``."""
    methods = [
        each for one in lineage(attributes.view, owner) for each in attributes.view.methods(one).values()
    ]
    stored = [
        name
        for method in methods
        for node in walk_ast(method)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if (name := own_attribute(node))
    ]
    found = {}
    for node in init.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = own_attribute(node.targets[0])
            if name and stored.count(name) == 1:
                found[name] = node.value
    return found


def _is_given(value: ast.expr, init: FunctionNode) -> bool:
    """Whether an expression reads what ``__init__`` is given, and has the same value all through it."""
    if not all(isinstance(each, _PURE) for each in walk_ast(value)):
        return False
    names = {each.id for each in walk_ast(value) if isinstance(each, ast.Name)}
    return names <= parameter_names(init) and names.isdisjoint(own_names(init.body))


def _by_value(choice: ast.expr, setting: set[str]) -> dict[str | None, ast.expr]:
    """What a choice by a setting gives for each value of it, and under None for others; empty: it is none."""
    found: dict[str | None, ast.expr] = {}
    while isinstance(choice, ast.IfExp):
        asked = _compared(choice.test)
        if asked is None or ast.dump(asked[0]) not in setting:
            return {}
        _, value, equal = asked
        if not equal and isinstance(choice.body, ast.IfExp):
            return {}
        found.setdefault(value, choice.body if equal else choice.orelse)
        choice = choice.orelse if equal else choice.body
    return {**found, None: choice} if found else {}

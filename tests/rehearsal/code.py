"""What rewrites share: a module that is being rewritten, facts of the whole release, the order of evaluation."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import COMPREHENSIONS, FUNCTIONS

_BRANCHES = (ast.IfExp, ast.BoolOp, *COMPREHENSIONS)


@dataclass(frozen=True)
class Facts:
    """What a rewrite of one module must know of the others.

    Attributes:
        imported: names that other modules import from a module, by its name.
        foreign: attributes and texts in code that all models share.
        names: parameters that the release renames, with their new names.
        kept: functions whose parameters keep their names, because code outside calls them.
    """

    imported: dict[str, set[str]] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)


@dataclass
class Rewrite:
    """A module that is being rewritten in place.

    Attributes:
        module: its name.
        tree: its syntax tree.
        draw: what is drawn at random.
        facts: of the release.
        more: texts of new modules, by name.
    """

    module: str
    tree: ast.Module
    draw: random.Random
    facts: Facts = field(default_factory=Facts)
    more: dict[str, ast.Module] = field(default_factory=dict)
    share: float = 0.7

    def chance(self) -> bool:
        """Whether something that could be rewritten is."""
        return self.draw.random() < self.share

    @cached_property
    def _names(self) -> set[str]:
        every = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        every |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        return every | {node.attr for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}

    def fresh(self, stem: str) -> str:
        """A name that the module does not use yet."""
        number = 1
        while (name := f"{stem}_{number}") in self._names:
            number += 1
        self._names.add(name)
        return name

    def functions(self) -> Iterator[tuple[ast.ClassDef | None, ast.FunctionDef]]:
        """The functions at top level and the methods of classes there."""
        for node in list(self.tree.body):
            if isinstance(node, ast.FunctionDef):
                yield None, node
            elif isinstance(node, ast.ClassDef):
                yield from ((node, each) for each in list(node.body) if isinstance(each, ast.FunctionDef))

    def insert(self, text: str, before: ast.stmt | None = None) -> None:
        """Insert statements before one at top level, or after the imports."""
        last = [i for i, each in enumerate(self.tree.body) if isinstance(each, ast.Import | ast.ImportFrom)]
        index = self.tree.body.index(before) if before is not None else (last or [-1])[-1] + 1
        self.tree.body[index:index] = ast.parse(text).body


def blocks(function: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of statements of a function, not of functions and classes in it."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(function, name, None)
        if isinstance(block, list) and block:
            yield block
            for each in list(block):
                if not isinstance(each, (*FUNCTIONS, ast.ClassDef)):
                    yield from blocks(each)
    for handler in getattr(function, "handlers", ()):
        yield from blocks(handler)


def head(statement: ast.stmt) -> ast.expr | None:
    """The expression that a statement evaluates first."""
    match statement:
        case ast.Assign() | ast.Return() | ast.Expr():
            return statement.value
        case ast.AugAssign(target=ast.Name()):
            return statement.value
        case ast.If():
            return statement.test
        case ast.For():
            return statement.iter
    return None


def evaluated(node: ast.AST | None) -> list[ast.AST]:
    """What an expression surely evaluates, in this order, up to where that depends on a value."""
    order: list[ast.AST] = []
    if node is not None:
        _evaluated(node, order)
    return order


def _evaluated(node: ast.AST, order: list[ast.AST]) -> bool:
    if isinstance(node, ast.Lambda):
        return True
    if isinstance(node, _BRANCHES) or (isinstance(node, ast.Compare) and len(node.ops) > 1):
        first = getattr(node, "test", None) or getattr(node, "left", None)
        first = first or (node.values[0] if isinstance(node, ast.BoolOp) else node.generators[0].iter)  # type: ignore[attr-defined]
        _evaluated(first, order)
        return False
    if not all(_evaluated(child, order) for child in ast.iter_child_nodes(node)):
        return False
    order.append(node)
    return True


def put(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Put a node into another's place below ``root``."""
    for node in ast.walk(root):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
                return
            if isinstance(value, list):
                for index, each in enumerate(value):
                    if each is old:
                        value[index] = new
                        return
    raise ValueError(f"{ast.dump(old)} is not in it")


def stores(root: ast.AST) -> list[str]:
    """The names that code binds, as often as it does; parameters of nested functions too."""
    found = [n.id for n in ast.walk(root) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    for node in ast.walk(root):
        if node is not root and isinstance(node, (*FUNCTIONS, ast.Lambda)):
            found += parameter_names(node)
            found += [node.name] if not isinstance(node, ast.Lambda) else []
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.append(node.name)
        elif isinstance(node, ast.alias):
            found.append((node.asname or node.name).partition(".")[0])
    return found


def reads(root: ast.AST) -> list[str]:
    """The names that code reads, as often as it does; what it adds to counts."""
    found = [n.id for n in ast.walk(root) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    for node in ast.walk(root):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.append(node.target.id)
    return found


def is_docstring(statement: ast.stmt) -> bool:
    """Whether a statement is a text."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def as_read(name: str) -> ast.Name:
    """A name that is read."""
    return ast.Name(name, ast.Load())


def odd(function: FunctionNode) -> bool:
    """Whether a function is of a kind that rewrites leave alone: a generator, or one that looks at its frame."""
    kinds = (ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Match)
    return any(
        isinstance(node, kinds) or (isinstance(node, ast.Name) and node.id in ("locals", "globals", "eval"))
        for node in ast.walk(function)
    )

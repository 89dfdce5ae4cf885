"""Random small changes of a recognised body: operators, constants, casts, operands, statements."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

__all__ = ["Mutant", "mutants"]

Mutant: TypeAlias = tuple[str, ast.Module]
_Change: TypeAlias = tuple[str, Callable[[], None]]

_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.Div),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.MatMult: (ast.Mult,),
}
_METHODS = {
    "rsqrt": "sqrt",
    "mean": "sum",
    "sum": "mean",
    "pow": "mul",
    "float": "double",
    "cos": "sin",
    "sin": "cos",
    "sigmoid": "tanh",
    "silu": "relu",
    "softmax": "log_softmax",
    "clamp": "relu",
    "chunk": "split",
    "add": "sub",
}
_CASTS = ("float", "to", "type_as", "bfloat16", "type")


def mutants(tree: ast.Module, names: list[str], count: int, seed: int) -> Iterator[Mutant]:
    """Change one thing in one of the definitions ``names`` (``f``, ``Class.method``), ``count`` times.

    Yields:
        What was changed, and the whole changed module.
    """
    draw = random.Random(seed)
    for _ in range(count):
        changed = copy.deepcopy(tree)
        bodies = [node for name in names if (node := _find(changed, name)) is not None]
        changes = [change for body in bodies for change in _changes(body, draw)]
        if not changes:
            return
        label, apply = draw.choice(changes)
        apply()
        yield label, ast.fix_missing_locations(changed)


def _find(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = next((s for s in reversed(body) if isinstance(s, kinds) and s.name == part), None)
        if found is None:
            return None
        body = found.body
    return found if isinstance(found, ast.FunctionDef) else None


def _changes(function: ast.FunctionDef, draw: random.Random) -> Iterator[_Change]:
    reads = sorted(
        {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    )
    local = {a.arg for a in function.args.args} | {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    exchangeable = [name for name in reads if name in local and name != "self"]
    for statement in function.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        for node in ast.walk(statement):
            yield from _of_node(node, exchangeable, draw)
    plain = [s for s in function.body if isinstance(s, ast.Assign | ast.AugAssign)]
    for statement in plain:
        yield f"line {statement.lineno}: statement dropped", lambda s=statement: function.body.remove(s)


def _of_node(node: ast.AST, names: list[str], draw: random.Random) -> Iterator[_Change]:
    where = f"line {getattr(node, 'lineno', 0)}"
    kinds: tuple[tuple[type[ast.AST], Callable[..., Iterator[_Change]]], ...] = (
        (ast.BinOp, _of_operator),
        (ast.Constant, _of_constant),
        (ast.UnaryOp, _of_sign),
        (ast.Name, _of_name),
        (ast.Call, _of_call),
        (ast.Return, _of_return),
        (ast.Slice, _of_slice),
    )
    for kind, changes in kinds:
        if isinstance(node, kind):
            yield from changes(node, where, names, draw)


def _of_operator(node: ast.BinOp, where: str, names: list[str], draw: random.Random) -> Iterator[_Change]:
    for other in _OPERATORS.get(type(node.op), ()):
        label = f"{where}: {type(node.op).__name__} to {other.__name__}"
        yield label, lambda other=other: setattr(node, "op", other())

    def turn() -> None:
        node.left, node.right = node.right, node.left

    yield f"{where}: operands of {type(node.op).__name__} swapped", turn


def _of_constant(node: ast.Constant, where: str, names: list[str], draw: random.Random) -> Iterator[_Change]:
    value = node.value
    if isinstance(value, int | float):
        new = (not value) if isinstance(value, bool) else draw.choice((value + 1, -value, value * 2))
        yield f"{where}: {value} to {new}", lambda: setattr(node, "value", new)


def _of_sign(node: ast.UnaryOp, where: str, names: list[str], draw: random.Random) -> Iterator[_Change]:
    if isinstance(node.op, ast.USub):
        yield f"{where}: sign dropped", lambda: setattr(node, "op", ast.UAdd())


def _of_name(node: ast.Name, where: str, names: list[str], draw: random.Random) -> Iterator[_Change]:
    others = [name for name in names if name != node.id]
    if isinstance(node.ctx, ast.Load) and node.id in names and others:
        new = draw.choice(others)
        yield f"{where}: {node.id} to {new}", lambda: setattr(node, "id", new)


def _of_call(node: ast.Call, where: str, names: list[str], draw: random.Random) -> Iterator[_Change]:
    attribute = node.func
    if not isinstance(attribute, ast.Attribute):
        return
    if attribute.attr in _METHODS:
        other = _METHODS[attribute.attr]
        yield f"{where}: {attribute.attr} to {other}", lambda: setattr(attribute, "attr", other)
    if attribute.attr in _CASTS:

        def drop() -> None:
            node.func = ast.Attribute(attribute.value, "clone", ast.Load())
            node.args, node.keywords = [], []

        yield f"{where}: cast .{attribute.attr} dropped", drop
    for keyword in node.keywords:
        if keyword.arg is not None:
            label = f"{where}: keyword {keyword.arg} dropped"
            yield label, lambda keyword=keyword: node.keywords.remove(keyword)


def _of_return(node: ast.Return, where: str, names: list[str], draw: random.Random) -> Iterator[_Change]:
    value = node.value
    if value is not None and not isinstance(value, ast.Tuple):
        cast = ast.Call(ast.Attribute(value, "float", ast.Load()), [], [])
        yield f"{where}: result cast to float32", lambda: setattr(node, "value", cast)


def _of_slice(node: ast.Slice, where: str, names: list[str], draw: random.Random) -> Iterator[_Change]:
    if (node.lower is None) != (node.upper is None):

        def turn() -> None:
            node.lower, node.upper = node.upper, node.lower

        yield f"{where}: other half of a slice", turn

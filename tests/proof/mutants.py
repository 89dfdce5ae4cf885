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
    reads = sorted({n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)})
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
    if isinstance(node, ast.BinOp):
        for other in _OPERATORS.get(type(node.op), ()):
            yield (
                f"{where}: {type(node.op).__name__} to {other.__name__}",
                lambda n=node, o=other: setattr(n, "op", o()),
            )

        def turn(n: ast.BinOp = node) -> None:
            n.left, n.right = n.right, n.left

        yield f"{where}: operands of {type(node.op).__name__} swapped", turn
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = node.value
        new = (not value) if isinstance(value, bool) else draw.choice((value + 1, -value, value * 2))
        yield f"{where}: {value} to {new}", lambda n=node, v=new: setattr(n, "value", v)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield f"{where}: sign dropped", lambda n=node: setattr(n, "op", ast.UAdd())
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
        new_name = draw.choice([name for name in names if name != node.id])
        yield f"{where}: {node.id} to {new_name}", lambda n=node, v=new_name: setattr(n, "id", v)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        attribute = node.func
        if attribute.attr in _METHODS:
            yield (
                f"{where}: {attribute.attr} to {_METHODS[attribute.attr]}",
                lambda a=attribute: setattr(a, "attr", _METHODS[a.attr]),
            )
        if attribute.attr in _CASTS:

            def drop(n: ast.Call = node, a: ast.Attribute = attribute) -> None:
                n.func, n.args, n.keywords = ast.Attribute(a.value, "clone", ast.Load()), [], []

            yield f"{where}: cast .{attribute.attr} dropped", drop
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield (
                    f"{where}: keyword {keyword.arg} dropped",
                    lambda n=node, k=keyword: n.keywords.remove(k),
                )
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Tuple):

        def cast(n: ast.Return = node) -> None:
            assert n.value is not None
            n.value = ast.Call(ast.Attribute(n.value, "float", ast.Load()), [], [])

        yield f"{where}: result cast to float32", cast
    if isinstance(node, ast.Slice) and (node.lower is None) != (node.upper is None):

        def other_half(n: ast.Slice = node) -> None:
            n.lower, n.upper = n.upper, n.lower

        yield f"{where}: other half of a slice", other_half

"""Every small change of a function, one at a time."""

import ast
import copy
from collections.abc import Iterator

_OPERATORS = {
    ast.Add: (ast.Sub, ast.Mult), ast.Sub: (ast.Add,), ast.Mult: (ast.Add, ast.Div), ast.Div: (ast.Mult,),
}  # fmt: skip
_COMPARISONS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}  # fmt: skip
_OTHER_NAMES = {
    "float32": "float16", "float": "half", "rsqrt": "sqrt", "mean": "sum", "cat": "stack", "silu": "gelu",
    "pow": "mul",
}  # fmt: skip


def mutants(function: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
    """Copies of ``function`` with one change each."""
    names = sorted({argument.arg for argument in function.args.args} | set(_stored(function)))
    for number, node in enumerate(ast.walk(function)):
        for change in _changes(node, names):
            mutant = copy.deepcopy(function)
            spot = list(ast.walk(mutant))[number]
            replaced = change(spot)
            if replaced is not None:
                _replace(mutant, spot, replaced)
            ast.fix_missing_locations(mutant)
            yield mutant


def _stored(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _changes(node: ast.AST, names: list[str]):
    """Functions that change a node of this kind, or return its replacement."""
    for kinds, changes in _CHANGES:
        if isinstance(node, kinds):
            yield from changes(node)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        for other in names:
            if other != node.id:
                yield lambda spot, other=other: setattr(spot, "id", other)


def _of_operations(node: ast.BinOp):
    for other in _OPERATORS.get(type(node.op), ()):
        yield lambda spot, other=other: setattr(spot, "op", other())
    yield _swap("left", "right")
    if isinstance(node.left, ast.BinOp):
        yield _regroup
    yield lambda spot: spot.left


def _of_constants(node: ast.Constant):
    value = node.value
    others = ()
    if isinstance(value, bool) or value is None:
        others = (not value,)
    elif isinstance(value, int | float):
        others = (value + 1, -value - 1, value * 2)
    for other in others:
        yield lambda spot, other=other: setattr(spot, "value", other)


def _of_calls(node: ast.Call):
    if isinstance(node.func, ast.Attribute):
        yield lambda spot: spot.func.value
    if node.args:
        yield lambda spot: spot.args[0]
    if len(node.args) > 1:
        yield lambda spot: spot.args.reverse()
    for position in range(len(node.keywords)):
        yield lambda spot, position=position: spot.keywords.pop(position) and None


def _of_attributes(node: ast.Attribute):
    if node.attr in _OTHER_NAMES:
        yield lambda spot: setattr(spot, "attr", _OTHER_NAMES[spot.attr])


def _of_slices(node: ast.Slice):
    yield _swap("lower", "upper")
    yield lambda spot: setattr(spot, "lower", None)
    yield lambda spot: setattr(spot, "upper", None)


def _of_comparisons(node: ast.Compare):
    for old, new in _COMPARISONS.items():
        if isinstance(node.ops[0], old):
            yield lambda spot, new=new: spot.ops.__setitem__(0, new())


def _of_tuples(node: ast.Tuple | ast.List):
    if len(node.elts) > 1:
        yield lambda spot: spot.elts.reverse()


def _of_blocks(node: ast.FunctionDef | ast.If | ast.For):
    for position in range(len(node.body) - 1):
        yield lambda spot, position=position: spot.body.insert(position, spot.body.pop(position + 1))
        yield lambda spot, position=position: spot.body.pop(position) and None


def _swap(first: str, second: str):
    def change(spot: ast.AST) -> None:
        one, other = getattr(spot, first), getattr(spot, second)
        setattr(spot, first, other)
        setattr(spot, second, one)

    return change


def _regroup(spot: ast.BinOp) -> ast.BinOp:
    inner = spot.left
    assert isinstance(inner, ast.BinOp)
    return ast.BinOp(inner.left, inner.op, ast.BinOp(inner.right, spot.op, spot.right))


def _replace(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(root):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                for position, item in enumerate(value):
                    if item is old:
                        value[position] = new


_CHANGES = (
    (ast.BinOp, _of_operations),
    (ast.Constant, _of_constants),
    (ast.Call, _of_calls),
    (ast.Attribute, _of_attributes),
    (ast.UnaryOp, lambda node: [lambda spot: spot.operand]),
    (ast.Slice, _of_slices),
    (ast.Compare, _of_comparisons),
    (ast.IfExp, lambda node: [_swap("body", "orelse")]),
    ((ast.Tuple, ast.List), _of_tuples),
    ((ast.FunctionDef, ast.If, ast.For), _of_blocks),
)

"""Small changes of expressions: operators, constants, names, casts, arguments, indices."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

#: The kind of a change, what it says of itself, its line, and how it is made.
Change: TypeAlias = tuple[str, str, int, Callable[[], None]]
Put: TypeAlias = Callable[[ast.AST], None]
_Made: TypeAlias = Iterator[tuple[str, str, Callable[[], None]]]

_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult), ast.Sub: (ast.Add,), ast.Mult: (ast.Add, ast.Div),
    ast.Div: (ast.Mult, ast.FloorDiv), ast.FloorDiv: (ast.Mult, ast.Mod), ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,), ast.MatMult: (ast.Mult,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,),
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq, ast.Gt), ast.NotEq: (ast.Eq,), ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
#: Names of functions and methods, each with others that take the same arguments.
_CALLED = {
    "rsqrt": "sqrt exp", "sqrt": "rsqrt square", "mean": "sum amax", "sum": "mean cumsum", "pow": "mul add",
    "square": "abs sqrt", "cos": "sin", "sin": "cos", "sigmoid": "tanh softplus", "tanh": "sigmoid relu",
    "silu": "relu gelu", "gelu": "silu", "softmax": "log_softmax softmin", "clamp": "clip relu clamp_min",
    "chunk": "split tensor_split", "split": "chunk tensor_split", "add": "sub mul", "mul": "add div",
    "div": "mul", "topk": "kthvalue sort", "sort": "argsort", "max": "min", "min": "max", "amax": "amin",
    "argmax": "argmin", "gather": "take_along_dim index_select", "scatter": "scatter_add",
    "scatter_": "scatter_add_", "scatter_add_": "scatter_", "index_add_": "index_copy_",
    "masked_fill": "masked_fill_", "masked_fill_": "masked_fill", "cat": "stack hstack", "stack": "cat",
    "unsqueeze": "squeeze", "squeeze": "unsqueeze", "transpose": "roll", "norm": "mean", "ones": "zeros",
    "zeros": "ones", "ones_like": "zeros_like rand_like", "zeros_like": "ones_like rand_like",
    "empty_like": "zeros_like", "repeat_interleave": "repeat", "repeat": "repeat_interleave",
    "expand": "repeat", "flatten": "ravel squeeze", "where": "maximum", "nonzero": "argwhere",
    "permute": "reshape", "view": "reshape", "reshape": "view", "matmul": "mul", "bmm": "mul",
    "linear": "bilinear", "exp": "log", "log": "exp", "type_as": "view_as", "contiguous": "detach",
    "normalize": "softmax", "greater": "less", "any": "all", "all": "any",
}  # fmt: skip
_CASTS = ("float", "to", "type_as", "bfloat16", "type", "half", "double", "long", "int", "bool")
_DTYPES = ("float32", "float", "bfloat16", "float16", "float64", "int64", "long")
#: What a value may be replaced by; the first three are other spellings of the same.
_WRAPPED = (
    "{}.clone()", "{}.contiguous()", "({} * 1)",
    "{}.detach()", "{}.double()", "{}.bfloat16()", "{}.float()", "(-{})", "({} * 2)", "({} + 1)", "(1 - {})",
    "{}.abs()", "{}.flip(-1)", "{}.flip(0)", "{}.transpose(0, 1)", "{}.clamp(min=0)", "{}[..., :]", "{}[:1]",
    "{}.mean(-1, keepdim=True)", "torch.nan_to_num({})", "{}.data",
)  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """What a changed expression may name instead: locals, and attributes of ``self``."""

    names: Sequence[str]
    attributes: Sequence[str]
    draw: random.Random

    def other(self, names: Sequence[str], than: str) -> str | None:
        """One of several names that is not ``than``."""
        others = [name for name in names if name != than]
        return self.draw.choice(others) if others else None


def of_expression(
    node: ast.AST, put: Put, around: Surroundings, *, is_callee: bool = False
) -> Iterator[Change]:
    """What may be changed about one node, whose place ``put`` fills."""
    kinds: tuple[tuple[type[ast.AST], Callable[..., _Made]], ...] = (
        (ast.BinOp, _operator),
        (ast.Compare, _comparison),
        (ast.BoolOp, _condition),
        (ast.IfExp, _choice),
        (ast.UnaryOp, _sign),
        (ast.Constant, _constant),
        (ast.Name, _name),
        (ast.Attribute, _attribute),
        (ast.Call, _call),
        (ast.Call, _arguments),
        (ast.Tuple, _tuple),
        (ast.Subscript, _subscript),
        (ast.Slice, _slice),
        (ast.expr, _wrapped),
    )
    for kind, changes in kinds:
        if isinstance(node, kind) and not (is_callee and changes is _wrapped):
            for name, label, apply in changes(node, put, around):
                yield name, label, getattr(node, "lineno", 0), apply


def _set(node: ast.AST, field: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, field, value)


def _operator(node: ast.BinOp, put: Put, around: Surroundings) -> _Made:
    was = type(node.op).__name__
    for other in _OPERATORS.get(type(node.op), ()):
        yield "operator", f"{was} to {other.__name__}", _set(node, "op", other())

    def turn() -> None:
        node.left, node.right = node.right, node.left

    yield "operands swapped", f"operands of {was} swapped", turn
    yield "operand dropped", f"only the left of {was}", lambda: put(node.left)
    yield "operand dropped", f"only the right of {was}", lambda: put(node.right)


def _comparison(node: ast.Compare, put: Put, around: Surroundings) -> _Made:
    was = type(node.ops[0])
    for other in _COMPARISONS.get(was, ()):
        yield "comparison", f"{was.__name__} to {other.__name__}", _set(node, "ops", [other()])


def _condition(node: ast.BoolOp, put: Put, around: Surroundings) -> _Made:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "condition", f"{type(node.op).__name__} to {type(other).__name__}", _set(node, "op", other)
    for value in node.values:
        yield "condition", f"only {ast.unparse(value)}", lambda value=value: put(value)


def _choice(node: ast.IfExp, put: Put, around: Surroundings) -> _Made:
    yield "condition", "always the first", lambda: put(node.body)
    yield "condition", "always the second", lambda: put(node.orelse)


def _sign(node: ast.UnaryOp, put: Put, around: Surroundings) -> _Made:
    yield "sign", f"{type(node.op).__name__} dropped", lambda: put(node.operand)
    if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        for other in (0, -2, 1):
            text = ast.unparse(node)
            if text != str(other):
                yield "dimension", f"{text} to {other}", lambda other=other: put(ast.Constant(other))


def _constant(node: ast.Constant, put: Put, around: Surroundings) -> _Made:
    value = node.value
    if isinstance(value, bool):
        yield "constant", f"{value} to {not value}", _set(node, "value", not value)
    elif isinstance(value, int):
        for new in {value + 1, value - 1, -value} - {value}:
            yield "constant", f"{value} to {new}", _set(node, "value", new)
    elif isinstance(value, float):
        # A small number has to become a large one: compared within rounding, it would not be seen.
        for new in dict.fromkeys((value + 1, -value, value * 2 if abs(value) > 1e-2 else 0.5)):
            if new != value:
                yield "constant", f"{value} to {new}", _set(node, "value", new)


def _name(node: ast.Name, put: Put, around: Surroundings) -> _Made:
    new = around.other(around.names, node.id)
    if isinstance(node.ctx, ast.Load) and node.id in around.names and new is not None:
        yield "name", f"{node.id} to {new}", _set(node, "id", new)


def _attribute(node: ast.Attribute, put: Put, around: Surroundings) -> _Made:
    if node.attr in _DTYPES and isinstance(node.value, ast.Name) and node.value.id == "torch":
        for new in ("float32", "bfloat16", "float64"):
            if new != node.attr:
                yield "dtype", f"{node.attr} to {new}", _set(node, "attr", new)
    if isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name) and node.value.id == "self":
        new = around.other(around.attributes, node.attr) or node.attr
        if new != node.attr:
            yield "attribute", f"self.{node.attr} to self.{new}", _set(node, "attr", new)
    if node.attr == "shape":
        yield "attribute", "shape reversed", lambda: put(_reversed(node))


def _reversed(node: ast.expr) -> ast.expr:
    return ast.Subscript(node, ast.Slice(None, None, ast.UnaryOp(ast.USub(), ast.Constant(1))), ast.Load())


def _call(node: ast.Call, put: Put, around: Surroundings) -> _Made:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    field = "attr" if isinstance(function, ast.Attribute) else "id"
    for other in _CALLED.get(name, "").split():
        yield "function", f"{name} to {other}", _set(function, field, other)
    in_torch = isinstance(function, ast.Attribute) and ast.unparse(function.value) in (
        "torch", "F", "nn.functional", "torch.nn.functional",
    )  # fmt: skip
    if isinstance(function, ast.Attribute) and not in_torch:
        kind = "cast dropped" if name in _CASTS else "call dropped"
        yield kind, f".{name} dropped", lambda: put(function.value)
    if node.args and not isinstance(node.args[0], ast.Starred):
        yield "call dropped", f"{name} dropped", lambda: put(node.args[0])


def _arguments(node: ast.Call, put: Put, around: Surroundings) -> _Made:
    for index in range(len(node.args)):
        text = ast.unparse(node.args[index])
        yield "argument dropped", f"argument {text} dropped", lambda index=index: node.args.pop(index)
    for index in range(len(node.args) - 1):

        def turn(index: int = index) -> None:
            node.args[index], node.args[index + 1] = node.args[index + 1], node.args[index]

        yield "arguments swapped", f"arguments {index} and {index + 1} swapped", turn
    for keyword in node.keywords:
        label = f"keyword {keyword.arg or '**'} dropped"
        yield "keyword dropped", label, lambda keyword=keyword: node.keywords.remove(keyword)
        if keyword.arg is not None and (new := around.other(around.names, ast.unparse(keyword.value))):
            yield "keyword value", f"{keyword.arg}={new}", _set(keyword, "value", ast.Name(new, ast.Load()))
    named = [keyword for keyword in node.keywords if keyword.arg is not None]
    if len(named) > 1:
        one, two = around.draw.sample(named, 2)

        def exchange() -> None:
            one.value, two.value = two.value, one.value

        yield "keyword value", f"values of {one.arg} and {two.arg} swapped", exchange
    if around.names and node.keywords:
        value = ast.Name(around.draw.choice(list(around.names)), ast.Load())
        added = around.draw.choice(
            ("weight", "dim", "dtype", "shift_labels", "ignore_index", "scale", "mask")
        )
        yield "keyword added", f"{added}={value.id}", lambda: node.keywords.append(ast.keyword(added, value))


def _tuple(node: ast.Tuple, put: Put, around: Surroundings) -> _Made:
    for index in range(len(node.elts)):
        yield "tuple", f"element {index} dropped", lambda index=index: node.elts.pop(index)
    if len(node.elts) > 1:

        def turn() -> None:
            node.elts[0], node.elts[1] = node.elts[1], node.elts[0]

        yield "tuple", "elements swapped", turn


def _subscript(node: ast.Subscript, put: Put, around: Surroundings) -> _Made:
    if isinstance(node.ctx, ast.Load):
        yield "index", "index dropped", lambda: put(node.value)
        for text in ("...", "0", "-1", ":, :1", "..., :1", "None", "..., ::2", "1:", ":-1"):
            new = ast.parse(f"x[{text}]", mode="eval").body.slice  # type: ignore[attr-defined]
            if ast.unparse(new) != ast.unparse(node.slice):
                yield "index", f"index [{text}]", _set(node, "slice", new)


def _slice(node: ast.Slice, put: Put, around: Surroundings) -> _Made:
    if (node.lower is None) != (node.upper is None):

        def turn() -> None:
            node.lower, node.upper = node.upper, node.lower

        yield "slice", "other half of a slice", turn
    if node.lower is None:
        yield "slice", "slice from 1", _set(node, "lower", ast.Constant(1))
    if node.upper is None:
        minus = ast.UnaryOp(ast.USub(), ast.Constant(1))
        yield "slice", "slice to -1", _set(node, "upper", minus)
    if node.step is None:
        yield "slice", "step 2", _set(node, "step", ast.Constant(2))


def _wrapped(node: ast.expr, put: Put, around: Surroundings) -> _Made:
    loaded = isinstance(node, ast.Call | ast.BinOp) or (
        isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load)
    )
    if not loaded or (isinstance(node, ast.Name) and node.id not in around.names):
        return
    template = around.draw.choice(_WRAPPED)
    text = template.format(f"({ast.unparse(node)})")

    def wrap() -> None:
        made = ast.parse(text, mode="eval").body
        put(ast.copy_location(made, node))

    kind = "detach" if template.endswith((".detach()", ".data")) else "value changed"
    yield kind, f"{ast.unparse(node)[:40]} to {text[:60]}", wrap

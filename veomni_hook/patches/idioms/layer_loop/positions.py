"""The domain of positions: a value is what is known of its positions.

The layers of a model run on a part of the positions. So what they compute must be for each position by
itself, except where all positions are known to come together (`attention`); everything else is refused.
"""

from __future__ import annotations

import ast
import operator as operators
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from veomni_hook.patches.code.tree import compared_with_none, decorator_name, own_attribute
from veomni_hook.patches.idioms.layer_loop.attention import ATTRIBUTES, STATE, by_segment
from veomni_hook.patches.idioms.layer_loop.calls import Calls
from veomni_hook.patches.idioms.layer_loop.modules import ACTIVATION, LOOK_UPS, dimensions_of, method_of
from veomni_hook.patches.idioms.layer_loop.parts import check_written, part_of
from veomni_hook.patches.idioms.layer_loop.shapes import broadcast, matmul
from veomni_hook.patches.idioms.layer_loop.values import (
    EMPTY,
    END,
    KEYS,
    NOTHING,
    PLACES,
    PLAIN,
    POSITIONS,
    START,
    Items,
    Many,
    Maybe,
    Method,
    Module,
    Operation,
    Plain,
    Size,
    Tensor,
    Unknown,
    Value,
    Whole,
    all_joined,
    bare,
    fresh,
    is_positional,
    joined,
    shaped,
    tensor_like,
    used,
)
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.interpreter.walk import assign, conditional, evaluate, run
from veomni_hook.patches.site import Code, Missed

__all__ = ["Positions"]

#: Attributes of a tensor that are no methods.
_ABOUT: dict[str, Callable[[Any], Value]] = {
    **dict.fromkeys(("data", "real", "imag"), lambda value: value),
    **dict.fromkeys(("dtype", "device", "requires_grad", "is_cuda", "layout"), lambda value: PLAIN),
    "shape": lambda value: Items(tuple(Size(dim) for dim in value.dims)),
    "ndim": lambda value: Plain(len(value.dims)),
}
#: The parts of what `topk`, `sort` and others return.
_PAIR = ("values", "indices")
_COMPARED: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operators.eq,
    ast.NotEq: operators.ne,
    ast.Gt: operators.gt,
    ast.GtE: operators.ge,
    ast.Lt: operators.lt,
    ast.LtE: operators.le,
}
_CASTS = ("to", "float")
#: Loops of so many known items are followed item by item; others until nothing changes, in so many rounds.
_SHORT, _ROUNDS = 8, 4


class Positions(Calls):
    """Values are what is known of their positions.

    Attributes:
        before: whether code before the layers is followed: what is not clear there holds all positions.
    """

    before = False

    def free(self, node: ast.Name, frame: Frame[Value]) -> Value:
        scope = self.view.scope
        if (function := scope.functions.get(node.id)) is not None:
            return Method(function)
        if node.id not in self.names and scope.resolve(node.id).startswith(":"):
            raise Missed(f"{node.id} is not known here", node)
        return PLAIN

    def unclear(self, error: Missed, node: ast.expr) -> Value:
        if not self.before:
            raise error.at(node)
        return Whole("a value that is made before the layers")

    def attribute(self, value: Value, node: ast.Attribute, frame: Frame[Value]) -> Value:
        if isinstance(node.value, ast.Name) and (known := frame.values.get(f"{node.value.id}.{node.attr}")):
            return known  # in this branch
        value = bare(value)
        if value == STATE and node.attr in _CASTS:
            return Operation(STATE, node.attr)
        if isinstance(value, Unknown):
            raise Missed(f"it uses {value.reason}", node)
        if isinstance(value, Module) and len(value.names) == 1 and value != KEYS:
            return self._own(value, node.attr)
        if isinstance(value, Plain | Module) and value != KEYS:
            return PLAIN
        if isinstance(value, Size):
            return tensor_like(value)
        return _part(value, node.attr) or Operation(value, node.attr)

    def _own(self, own: Module, name: str) -> Value:
        """An attribute of an instance of one class."""
        method = method_of(self.view, own.names[0], name)
        known = self.attributes.of(own.names[0])
        if name in known:
            return known[name]
        if method is None or any(
            decorator_name(decorator) == "property" for decorator in method.node.decorator_list
        ):
            return PLAIN
        return method

    # Operators

    def binary(self, operator: ast.operator, left: Value, right: Value, node: ast.expr) -> Value:
        if isinstance(left, Items) and isinstance(right, Items) and isinstance(operator, ast.Add):
            return Items(left.values + right.values)
        if isinstance(operator, ast.Mult) and isinstance(left, Items) and isinstance(right, Plain):
            if isinstance(right.value, int):
                return Items(left.values * right.value)
        if (number := _number(operator, left, right)) is not None:
            return number
        left, right = tensor_like(left), tensor_like(right)
        if isinstance(operator, ast.MatMult):
            return matmul(left, right)
        return _met(left, right)

    def unary(self, value: Value, node: ast.UnaryOp) -> Value:
        value = tensor_like(value)
        number = value.value if isinstance(value, Plain) else None
        if isinstance(number, int | float) and isinstance(node.op, ast.USub):
            return Plain(-number)
        return value if isinstance(value, Tensor) else PLAIN

    def compare(self, values: Sequence[Value], node: ast.Compare) -> Value:
        match values, node.ops:
            case [value, Plain(None)], [ast.Is() | ast.IsNot() as asked]:
                if not isinstance(value, Maybe | Whole | Unknown) and value != PLAIN:
                    return Plain((value == NOTHING) is isinstance(asked, ast.Is))
            case [Size(), Plain(1)], [ast.Gt()] if not self.tower:
                return PLAIN  # a part has several positions exactly if the whole has
        if any(isinstance(operator, ast.Is | ast.IsNot | ast.In | ast.NotIn) for operator in node.ops):
            return PLAIN
        numbers = [value.value for value in values if isinstance(value, Plain) and type(value.value) is int]
        if len(numbers) == len(values) == 2 and type(node.ops[0]) in _COMPARED:
            return Plain(_COMPARED[type(node.ops[0])](*numbers))
        if self.asking and values == [Size((POSITIONS,)), Plain(1)] and isinstance(node.ops[0], ast.Eq):
            return Plain(False)  # a part has two positions at least (`collectives.part_length`)
        result: Value = PLAIN
        for value in values:
            result = _met(result, tensor_like(value))
        return result

    def logic(self, node: ast.BoolOp, frame: Frame[Value]) -> Value:
        values: list[Value] = []
        for part in node.values:
            values.append(conditional(part, frame) if values else evaluate(part, frame))
            if isinstance(node.op, ast.And) and values[-1] == Plain(False):
                return values[-1]
        return all_joined(values)

    # Parts of values

    def subscript(self, value: Value, node: ast.Subscript, frame: Frame[Value]) -> Value:
        if self.view.scope.dotted(node.value).endswith(LOOK_UPS):
            return Module((ACTIVATION,))
        rows = self._rows(node, frame) if isinstance(value, Plain) else None
        return part_of(value, node, frame) if rows is None else rows

    def _rows(self, node: ast.Subscript, frame: Frame[Value]) -> Tensor | None:
        """Rows of a table: a buffer, or in an indexer one row for each group of positions; None for others.

        self.expert_of_token[input_ids.reshape(-1)]
        pool_indices[batch_indices, selected]
        """
        own, rank, index = frame.values.get("self"), None, node.slice
        match index:
            case ast.Call() if isinstance(own, Module):
                rank = dimensions_of(self.view, own.names[0], own_attribute(node.value))
            case ast.Tuple(elts=[ast.Name(), ast.Name() as index]) if self.asking:
                rank = 2  # the code that gets these rows would not run with others
        number = evaluate(index, frame) if rank is not None else None
        if rank is None or not isinstance(number, Tensor):
            return None
        return Tensor((*number.dims, *(fresh() for _ in range(rank - 1))))

    # Branches and loops

    def test(self, node: ast.expr, frame: Frame[Value]) -> bool | Value:
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.test(operand, frame)
                return not inner if isinstance(inner, bool) else inner
            case ast.BoolOp(op=operator, values=parts):
                stop = isinstance(operator, ast.Or)
                known: list[bool | Value] = []
                for part in parts:
                    known.append(self.test(part, frame))
                    if known[-1] is stop:
                        return stop
                return PLAIN if PLAIN in known else not stop
        value = evaluate(node, frame)
        if isinstance(value, Tensor):
            raise Missed("a branch depends on values of some positions", node, Code.MIXES_POSITIONS)
        if isinstance(value, Size) and is_positional(value.dim):
            raise Missed("a branch depends on the number of positions", node, Code.MIXES_POSITIONS)
        return bool(value.value) if isinstance(value, Plain) and value != PLAIN else PLAIN

    def assume(self, node: ast.expr, outcome: bool, frame: Frame[Value]) -> None:  # noqa: FBT001 - of the test
        _assume(node, frame.values, outcome=outcome)
        own = frame.values.get("self")
        if isinstance(own, Module):
            chosen = self.attributes.chosen(own.names[0], node, outcome=outcome)
            frame.values.update({f"self.{name}": value for name, value in chosen.items()})

    def knows(self, statement: ast.If | ast.Assert, frame: Frame[Value]) -> bool:
        if isinstance(statement, ast.Assert):
            return True
        if not statement.orelse and all(isinstance(one, ast.Raise) for one in statement.body):
            absent = compared_with_none(statement.test, ast.Is)
            if isinstance(absent, ast.Name) and frame.values.get(absent.id) == NOTHING:
                return False
            _assume(statement.test, frame.values, outcome=False)
            return True  # a check
        match statement.body, statement.orelse:
            case [ast.Assign(value=packaged)], [ast.Assign(value=own)]:
                if {*map(self.view.document.start, (packaged, own))} <= self.convolutions:
                    run(statement.body, frame)  # a package's function, in place of a module
                    return True
        for segments in self.segments:
            for block, fused in ((statement.orelse, statement.body), (statement.body, statement.orelse)):
                if segments.block is block:
                    self.boundaries |= by_segment(segments, fused, frame)
                    return True
        return False

    def left(
        self, test: Value, results: Sequence[Value | None], statement: ast.stmt, frame: Frame[Value]
    ) -> Value | None:
        rest = [result for result in results if result != EMPTY]
        return super().left(test, results, statement, frame) if len(rest) == 2 else (*rest, EMPTY)[0]

    def loop(self, statement: ast.For, frame: Frame[Value]) -> None:
        values = bare(evaluate(statement.iter, frame))
        if isinstance(values, Tensor):
            raise Missed("a loop over positions", statement, Code.MIXES_POSITIONS)
        if statement.orelse:
            raise Missed("a loop with an else", statement)
        if isinstance(values, Items) and len(values.values) <= _SHORT:
            for value in values.values:
                self._round(statement, value, frame)
            return
        value = values.value if isinstance(values, Many) else values if isinstance(values, Whole) else PLAIN
        for _ in range(_ROUNDS):
            before = dict(frame.values)
            self._round(statement, value, frame)
            self.go_on(frame, [before, frame.values])
            if _outlines(before) == _outlines(frame.values):
                return
        raise Missed("a loop whose values change from round to round", statement)

    def _round(self, statement: ast.For, value: Value, frame: Frame[Value]) -> None:
        assign(statement.target, value, frame)
        frame.loops += 1
        result = run(statement.body, frame)
        if result is not None and result != EMPTY:
            raise Missed("a loop is left before its end", statement)
        frame.loops -= 1

    # Assignments

    def augmented(self, node: ast.AugAssign, frame: Frame[Value]) -> None:
        target = node.target
        read = ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else target
        computed = ast.BinOp(ast.copy_location(read, target), node.op, node.value)
        assign(target, evaluate(ast.copy_location(computed, node.value), frame), frame)

    def store(self, target: ast.expr, value: Value, frame: Frame[Value]) -> None:
        owner = evaluate(target.value, frame) if isinstance(target, ast.Subscript) else PLAIN
        if isinstance(target, ast.Subscript) and isinstance(owner, Tensor):
            try:
                check_written(owner, target, value, frame)
            except Missed as error:
                raise error.at(target) from None
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            if isinstance(owner, Plain) and isinstance(value, Plain):
                return
            if not isinstance(owner, Many):
                raise Missed("it writes to a part of a value", target, Code.IN_PLACE)
            frame.values[target.value.id] = Many(joined(owner.value, value))
        elif not isinstance(value, Plain):
            raise Missed(
                f"it keeps a value beyond the call: {ast.unparse(target)}", target, Code.USED_OTHERWISE
            )

    def unpacked(self, value: Value, targets: Sequence[ast.expr]) -> Sequence[Value]:
        try:
            value = used(value, len(targets))
        except Missed as error:
            raise error.at(targets[0]) from None
        if isinstance(value, Plain):
            return [PLAIN] * len(targets)
        if isinstance(value, Many):
            return [value.value] * len(targets)
        if isinstance(value, Items) and len(value.values) == len(targets):
            if not any(isinstance(target, ast.Starred) for target in targets):
                return value.values
        raise Missed("a value that is unpacked is not known", targets[0])

    def statement(self, node: ast.stmt, frame: Frame[Value]) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            frame.values.update({alias.asname or alias.name: PLAIN for alias in node.names})
        elif isinstance(node, ast.FunctionDef):
            frame.values[node.name] = Unknown(f"{node.name}, a function inside a function")
        elif not isinstance(node, ast.Delete | ast.Break):
            raise Missed(f"{type(node).__name__} is not followed", node)


def _part(value: Value, name: str) -> Value | None:
    """What an attribute of a value is, other than its methods."""
    if isinstance(value, Tensor) and name in _ABOUT:
        return _ABOUT[name](value)
    if isinstance(value, Items) and name in _PAIR and len(value.values) == len(_PAIR):
        return value.values[_PAIR.index(name)]
    return ATTRIBUTES.get(name) if value == KEYS else None


def _number(operator: ast.operator, left: Value, right: Value) -> Value | None:
    """What code computes from numbers of positions; None: from others."""
    if isinstance(operator, ast.Mult) and isinstance(left, Size) and isinstance(right, Size):
        return Size(left.dim + right.dim)
    if (left, right) == (END, Size((POSITIONS,))) and isinstance(operator, ast.Sub):
        return START
    return shaped("S") if (left, right) == (START, PLACES) and isinstance(operator, ast.Add) else None


def _met(left: Value, right: Value) -> Value:
    """What code computes from the elements of two values."""
    if not isinstance(left, Tensor | Plain) or not isinstance(right, Tensor | Plain):
        raise Missed("it computes with a value that is not followed")
    return broadcast(left, right)


def _assume(test: ast.expr, values: dict[str, Value], *, outcome: bool) -> None:
    """What a branch knows of names that may be None."""
    match test:
        case ast.BoolOp(op=operator, values=parts):
            for part in parts if isinstance(operator, ast.And) is outcome else ():
                _assume(part, values, outcome=outcome)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _assume(operand, values, outcome=not outcome)
        case ast.Compare(
            left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as operator], comparators=[ast.Constant(None)]
        ) if isinstance(value := values.get(name), Maybe):
            values[name] = NOTHING if isinstance(operator, ast.Is) is outcome else value.value


def _outlines(values: Mapping[str, Value]) -> dict[str, object]:
    return {name: _outline(value) for name, value in values.items()}


def _outline(value: Value) -> object:
    """A value without the names of sizes."""
    if isinstance(value, Tensor):
        return [dim if is_positional(dim) else None for dim in value.dims]
    if isinstance(value, Items):
        return [_outline(item) for item in value.values]
    if isinstance(value, Many | Maybe):
        return [type(value), _outline(value.value)]
    return value

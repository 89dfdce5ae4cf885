"""Evaluate expressions of layer code: what is known of each value's positions."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TypeAlias

from veomni_hook.patches.code.scope import global_bindings
from veomni_hook.patches.code.tree import decorator_name, walk_ast
from veomni_hook.patches.idioms.layer_loop.joining import joined
from veomni_hook.patches.idioms.layer_loop.modules import Attributes, method_of
from veomni_hook.patches.idioms.layer_loop.operations import operation
from veomni_hook.patches.idioms.layer_loop.shapes import broadcast, fresh, made, matmul
from veomni_hook.patches.idioms.layer_loop.values import (
    EMPTY,
    NOTHING,
    PLAIN,
    Dim,
    Items,
    Many,
    Maybe,
    Method,
    Module,
    Operation,
    Own,
    Plain,
    Size,
    Tensor,
    Unknown,
    Value,
    Whole,
    is_positional,
    read_from,
)
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed

__all__ = ["Environment", "Expressions"]

#: The values of local names.
Environment: TypeAlias = "MutableMapping[str, Value]"

_SAME = ("data", "real", "imag")
_ABOUT = ("dtype", "device", "requires_grad", "is_cuda", "layout")


class Expressions(ABC):
    """Evaluates expressions in the methods of the classes of one file.

    Args:
        view: the file.
    """

    def __init__(self, view: ModuleView) -> None:
        self.view = view
        self.attributes = Attributes(view)
        self._globals = global_bindings(view.document.tree)
        #: Before the layers run: what is not followed holds all positions, and is no error.
        self.before = False

    @abstractmethod
    def call(self, node: ast.Call, scope: Environment) -> Value:
        """The result of a call."""

    def evaluate(self, node: ast.expr, scope: Environment) -> Value:
        """What is known of an expression's value.

        Raises:
            Missed: it moves or mixes positions, or cannot be followed.
        """
        handler = getattr(self, f"_{type(node).__name__.lower()}", None)
        try:
            if handler is None:
                raise Missed(f"{type(node).__name__} is not followed", node)
            value: Value = handler(node, scope)
        except Missed:
            if not self.before:
                raise
            return Whole("a value that is made before the layers")
        return value

    def tensor_like(self, value: Value, node: ast.AST) -> Value:
        """A value that code computes with.

        Raises:
            Missed: it holds all positions, or it is not known.
        """
        value = value.value if isinstance(value, Maybe) else value
        if isinstance(value, Whole):
            raise Missed(f"it computes with {value.name}, which holds all positions", node)
        if isinstance(value, Unknown):
            raise Missed(f"it uses {value.reason}", node)
        if isinstance(value, Size):
            if is_positional(value.dim):
                raise Missed("it computes with the number of positions", node)
            return PLAIN
        return value

    def truth(self, node: ast.expr, scope: Environment) -> bool | None:
        """Whether a condition holds; None if both are possible.

        Raises:
            Missed: it depends on the positions.
        """
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand, scope)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            return self._any_or_all(node, scope)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            value, other = self.evaluate(node.left, scope), self.evaluate(node.comparators[0], scope)
            if other != NOTHING or isinstance(value, Maybe | Whole | Unknown) or value == PLAIN:
                return None
            return (value == NOTHING) is isinstance(node.ops[0], ast.Is)
        value = self.evaluate(node, scope)
        if isinstance(value, Tensor):
            raise Missed("a branch depends on values of some positions", node)
        if isinstance(value, Size) and is_positional(value.dim):
            raise Missed("a branch depends on the number of positions", node)
        return bool(value.value) if isinstance(value, Plain) and value != PLAIN else None

    def _any_or_all(self, node: ast.BoolOp, scope: Environment) -> bool | None:
        stop = isinstance(node.op, ast.Or)
        known: list[bool | None] = []
        for each in node.values:
            known.append(self.truth(each, scope))
            if known[-1] is stop:
                return stop
        return None if None in known else not stop

    def _constant(self, node: ast.Constant, scope: Environment) -> Value:
        return Plain(node.value) if node.value is not ... else PLAIN

    def _name(self, node: ast.Name, scope: Environment) -> Value:
        if node.id in scope:
            return scope[node.id]
        if (function := self.view.scope.functions.get(node.id)) is not None:
            return Method(function)
        if node.id not in self._globals and self.view.scope.resolve(node.id).startswith(":"):
            raise Missed(f"{node.id} is not known here", node)
        return PLAIN

    def _joinedstr(self, node: ast.JoinedStr, scope: Environment) -> Value:
        return PLAIN

    def _starred(self, node: ast.Starred, scope: Environment) -> Value:
        return self.evaluate(node.value, scope)

    def _namedexpr(self, node: ast.NamedExpr, scope: Environment) -> Value:
        scope[node.target.id] = value = self.evaluate(node.value, scope)
        return value

    def _tuple(self, node: ast.Tuple | ast.List, scope: Environment) -> Value:
        values: list[Value] = []
        for each in node.elts:
            value = self.evaluate(each, scope)
            if isinstance(each, ast.Starred):
                if isinstance(value, Plain) and len(node.elts) == 1:
                    return Many(PLAIN)
                if not isinstance(value, Items):
                    raise Missed("a tuple of unknown length", node)
                values += value.values
            else:
                values.append(value)
        return Items(tuple(values))

    _list = _tuple

    def _dict(self, node: ast.Dict, scope: Environment) -> Value:
        result: Value | None = None
        for each in node.values:
            value = self.evaluate(each, scope)
            result = value if result is None else joined(result, value)
        return Many(result) if result is not None else Many(EMPTY)

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, scope: Environment) -> Value:
        if len(node.generators) != 1 or node.generators[0].ifs:
            raise Missed("a comprehension that is not followed", node)
        target, values = node.generators[0].target, self.evaluate(node.generators[0].iter, scope)
        inner = dict(scope)
        if isinstance(values, Items):
            made_values = []
            for value in values.values:
                self.bind(target, value, inner)
                made_values.append(self.evaluate(node.elt, inner))
            return Items(tuple(made_values))
        if not isinstance(values, Many | Plain):
            raise Missed("a comprehension that is not followed", node)
        self.bind(target, values.value if isinstance(values, Many) else PLAIN, inner)
        return Many(self.evaluate(node.elt, inner))

    _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp, scope: Environment) -> Value:
        values = self._listcomp(ast.ListComp(node.value, node.generators), scope)
        result: Value = EMPTY
        for value in values.values if isinstance(values, Items) else ():
            result = joined(result, value)
        return values if isinstance(values, Many) else Many(result)

    def _ifexp(self, node: ast.IfExp, scope: Environment) -> Value:
        known = self.truth(node.test, scope)
        if known is not None:
            return self.evaluate(node.body if known else node.orelse, scope)
        return joined(self.evaluate(node.body, scope), self.evaluate(node.orelse, scope))

    def _boolop(self, node: ast.BoolOp, scope: Environment) -> Value:
        result: Value | None = None
        for each in node.values:
            value = self.evaluate(each, scope)
            result = value if result is None else joined(result, value)
        return result if result is not None else PLAIN

    def _compare(self, node: ast.Compare, scope: Environment) -> Value:
        values = [self.evaluate(each, scope) for each in (node.left, *node.comparators)]
        if any(isinstance(each, ast.Is | ast.IsNot | ast.In | ast.NotIn) for each in node.ops):
            return PLAIN
        result: Value = PLAIN
        for value in values:
            result = self._met(result, self.tensor_like(value, node), node)
        return result

    def _unaryop(self, node: ast.UnaryOp, scope: Environment) -> Value:
        value = self.tensor_like(self.evaluate(node.operand, scope), node)
        if (
            isinstance(value, Plain)
            and isinstance(value.value, int | float)
            and isinstance(node.op, ast.USub)
        ):
            return Plain(-value.value)
        return value if isinstance(value, Tensor) else PLAIN

    def _binop(self, node: ast.BinOp, scope: Environment) -> Value:
        left, right = self.evaluate(node.left, scope), self.evaluate(node.right, scope)
        return self.computed(left, right, node.op, node)

    def computed(self, left: Value, right: Value, operator: ast.operator, node: ast.AST) -> Value:
        """The result of an operator."""
        if isinstance(left, Items) and isinstance(right, Items) and isinstance(operator, ast.Add):
            return Items(left.values + right.values)
        if isinstance(operator, ast.Mult) and isinstance(left, Items) and isinstance(right, Plain):
            if isinstance(right.value, int):
                return Items(left.values * right.value)
        if isinstance(operator, ast.Mult) and isinstance(left, Size) and isinstance(right, Size):
            return Size(left.dim + right.dim)
        left, right = self.tensor_like(left, node), self.tensor_like(right, node)
        if isinstance(operator, ast.MatMult):
            return self.proven(lambda: matmul(left, right), node)
        return self._met(left, right, node)

    def _met(self, left: Value, right: Value, node: ast.AST) -> Value:
        if not isinstance(left, Tensor | Plain) or not isinstance(right, Tensor | Plain):
            raise Missed("it computes with a value that is not followed", node)
        return self.proven(lambda: broadcast(left, right), node)

    def proven(self, compute: Callable[[], Value], node: ast.AST) -> Value:
        """The result of a rule, whose error gets the line of ``node``."""
        try:
            return compute()
        except Missed as error:
            raise Missed(str(error), node if "(line " not in str(error) else None) from None

    def _attribute(self, node: ast.Attribute, scope: Environment) -> Value:
        value = self.evaluate(node.value, scope)
        value = value.value if isinstance(value, Maybe) else value
        if isinstance(value, Unknown):
            raise Missed(f"it uses {value.reason}", node)
        if isinstance(value, Module) and len(value.names) == 1 and value.names[0] in self.view.scope.classes:
            value = Own(value.names[0])
        if isinstance(value, Own):
            return self._own(value, node.attr)
        if isinstance(value, Plain | Module):
            return PLAIN
        if isinstance(value, Size):
            return self.tensor_like(value, node)
        return (_about(value, node.attr) if isinstance(value, Tensor) else None) or Operation(
            value, node.attr
        )

    def _own(self, own: Own, name: str) -> Value:
        """An attribute of an instance."""
        found = method_of(self.view, own.owner, name)
        known = self.attributes.of(own.owner)
        if name in known:
            return known[name]
        if found is None or any(decorator_name(each) == "property" for each in found[0].decorator_list):
            return PLAIN
        return Method(found[0], own)

    def _subscript(self, node: ast.Subscript, scope: Environment) -> Value:
        value = self.evaluate(node.value, scope)
        value = value.value if isinstance(value, Maybe) else value
        if isinstance(value, Plain):
            return self._of_parameter(node, scope)
        if isinstance(value, Whole):
            if any(isinstance(each, ast.Slice) for each in walk_ast(node.slice)):
                raise Missed(f"it takes a part of {value.name}", node)
            index = self.evaluate(node.slice, scope)
            if isinstance(index, Plain | Whole):
                return read_from(value, index, node)
            raise Missed(f"it takes a part of {value.name}", node)
        if isinstance(value, Tensor):
            return self._part(value, node, scope)
        if isinstance(value, Many):
            return value if isinstance(node.slice, ast.Slice) else value.value
        if isinstance(value, Items):
            return self._item(value, node, scope)
        if isinstance(value, Module):
            return PLAIN
        raise Missed("an index that is not followed", node)

    def _of_parameter(self, node: ast.Subscript, scope: Environment) -> Value:
        """A part of a parameter, which must not depend on the number of positions."""
        if isinstance(node.slice, ast.Name):
            index = self.tensor_like(self.evaluate(node.slice, scope), node)
            return index if isinstance(index, Tensor) else PLAIN  # one value for each index
        for each in walk_ast(node.slice):
            if isinstance(each, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
                index = self.tensor_like(self.evaluate(each, scope), node)
                if isinstance(index, Tensor):
                    raise Missed("a parameter is read at places that depend on the positions", node)
        return PLAIN

    def _item(self, value: Items, node: ast.Subscript, scope: Environment) -> Value:
        index = node.slice
        if isinstance(index, ast.Slice):
            bounds = [
                NOTHING if each is None else self.evaluate(each, scope)
                for each in (index.lower, index.upper, index.step)
            ]
            numbers = [
                each.value
                for each in bounds
                if isinstance(each, Plain) and (each.value is None or isinstance(each.value, int))
            ]
            if len(numbers) == len(bounds):
                return Items(value.values[slice(*numbers)])
        else:
            number = self.evaluate(index, scope)
            if isinstance(number, Plain) and isinstance(number.value, int):
                if -len(value.values) <= number.value < len(value.values):
                    return value.values[number.value]
            elif value.values and all(each == value.values[0] for each in value.values):
                return value.values[0]
        raise Missed("an index that is not known", node)

    def _part(self, value: Tensor, node: ast.Subscript, scope: Environment) -> Value:
        """A part of a tensor by slices, numbers, None and ``...``."""
        elements = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        taken = sum(not (_is_none(each) or _is_dots(each)) for each in elements)
        if taken > len(value.dims):
            raise Missed("more indices than dimensions", node)
        if not any(map(_is_dots, elements)):
            elements.append(ast.Constant(...))
        dims = list(value.dims)
        result: list[Dim] = []
        for each in elements:
            if _is_none(each):
                result.append(())
            elif _is_dots(each):
                count = len(value.dims) - taken
                result += dims[:count]
                del dims[:count]
            else:
                result += self._taken(dims.pop(0), each, node, scope)
        return made(result)

    def _taken(self, dim: Dim, index: ast.expr, node: ast.AST, scope: Environment) -> list[Dim]:
        if isinstance(index, ast.Slice):
            bounds = [each for each in (index.lower, index.upper, index.step) if each is not None]
            if not bounds or (index.lower is index.step is None and self._is_all(dim, bounds[0], scope)):
                return [dim]
            for each in bounds:
                self.tensor_like(self.evaluate(each, scope), node)
            if is_positional(dim):
                raise Missed("it takes a part of the positions", node)
            return [fresh()]
        number = self.tensor_like(self.evaluate(index, scope), node)
        if is_positional(dim) or not isinstance(number, Plain):
            raise Missed("it picks positions by an index", node)
        return []

    def _is_all(self, dim: Dim, bound: ast.expr, scope: Environment) -> bool:
        return self.evaluate(bound, scope) == Size(dim)

    def bind(self, target: ast.expr, value: Value, scope: Environment) -> None:
        """Assign a value to a target.

        Raises:
            Missed: the target is more than names, or a value cannot be unpacked.
        """
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for each, part in zip(target.elts, self._unpacked(target, value), strict=True):
                self.bind(each, part, scope)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            held = self.evaluate(target.value, scope)
            if not isinstance(held, Many):
                raise Missed("it writes to a part of a value", target)
            scope[target.value.id] = Many(joined(held.value, value))
        elif not isinstance(value, Plain):
            raise Missed(f"it keeps a value beyond the call: {ast.unparse(target)}", target)

    def _unpacked(self, target: ast.Tuple | ast.List, value: Value) -> list[Value]:
        value = value.value if isinstance(value, Maybe) else value
        number = len(target.elts)
        if isinstance(value, Plain):
            return [PLAIN] * number
        if isinstance(value, Many):
            return [value.value] * number
        if isinstance(value, Items):
            starred = [at for at, each in enumerate(target.elts) if isinstance(each, ast.Starred)]
            if not starred and len(value.values) == number:
                return list(value.values)
        raise Missed("a value that is unpacked is not known", target)

    def called(self, name: str, given: Sequence[Value], named: Mapping[str, Value], node: ast.AST) -> Value:
        """The result of a function of torch, or of a tensor's method."""
        bare = [self._argument(each) for each in given]
        rest = {key: self._argument(each) for key, each in named.items()}
        return self.proven(lambda: operation(name, bare, rest), node)

    def _argument(self, value: Value) -> Value:
        return value.value if isinstance(value, Maybe) else value


def _about(value: Tensor, name: str) -> Value | None:
    """An attribute of a tensor that is no method."""
    if name == "shape":
        return Items(tuple(Size(dim) for dim in value.dims))
    if name == "ndim":
        return Plain(len(value.dims))
    if name in ("mT", "mH"):
        return Tensor((*value.dims[:-2], value.dims[-1], value.dims[-2]))
    return PLAIN if name in _ABOUT else value if name in _SAME else None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_dots(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...

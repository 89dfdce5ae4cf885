"""Parts of values: what an index or a slice takes, and what code may write to one."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.idioms.layer_loop.shapes import broadcast, made
from veomni_hook.patches.idioms.layer_loop.values import (
    NOTHING,
    PLAIN,
    SLICE,
    Dim,
    Items,
    Many,
    Module,
    Plain,
    Size,
    Tensor,
    Value,
    Whole,
    bare,
    fresh,
    is_positional,
    read_from,
    tensor_like,
)
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.interpreter.walk import evaluate
from veomni_hook.patches.site import Code, Missed

__all__ = ["check_written", "part_of"]


def part_of(value: Value, node: ast.Subscript, frame: Frame[Value]) -> Value:
    """``value[...]``.

    Raises:
        Missed: it is a part of the positions, or not known.
    """
    value = bare(value)
    if isinstance(value, Plain):
        return _of_parameter(node, frame)
    if isinstance(value, Whole):
        if not any(isinstance(part, ast.Slice) for part in walk_ast(node.slice)):
            index = evaluate(node.slice, frame)
            if isinstance(index, Plain | Whole):
                return read_from(value, index)
        raise Missed(f"it takes a part of {value.name}", code=Code.MIXES_POSITIONS)
    if isinstance(value, Tensor):
        return _part(value, node, frame)
    if isinstance(value, Many):
        return value if isinstance(node.slice, ast.Slice) else value.value
    if isinstance(value, Items):
        return _item(value, node, frame)
    if isinstance(value, Module):
        return PLAIN
    raise Missed("an index that is not followed")


def _of_parameter(node: ast.Subscript, frame: Frame[Value]) -> Value:
    """A part of a parameter, which must not depend on the number of positions."""
    if isinstance(node.slice, ast.Name):
        index = tensor_like(evaluate(node.slice, frame))
        return index if isinstance(index, Tensor) else PLAIN  # one value for each index
    for part in walk_ast(node.slice):
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
            if isinstance(tensor_like(evaluate(part, frame)), Tensor):
                raise Missed(
                    "a parameter is read at places that depend on the positions", code=Code.MIXES_POSITIONS
                )
    return PLAIN


def _item(value: Items, node: ast.Subscript, frame: Frame[Value]) -> Value:
    index = node.slice
    if isinstance(index, ast.Slice):
        bounds = (index.lower, index.upper, index.step)
        numbers = [NOTHING if bound is None else evaluate(bound, frame) for bound in bounds]
        values = [number.value for number in numbers if isinstance(number, Plain)]
        known = [value for value in values if value is None or isinstance(value, int)]
        if len(known) == len(bounds):
            return Items(value.values[slice(*known)])
    else:
        number = evaluate(index, frame)
        if isinstance(number, Plain) and isinstance(number.value, int):
            if -len(value.values) <= number.value < len(value.values):
                return value.values[number.value]
        elif value.values and all(item == value.values[0] for item in value.values):
            return value.values[0]
    raise Missed("an index that is not known")


def _part(value: Tensor, node: ast.Subscript, frame: Frame[Value]) -> Value:
    """A part of a tensor by slices, numbers, None and ``...``."""
    elements = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    taken = sum(not (_is(element, None) or _is(element, ...)) for element in elements)
    if taken > len(value.dims):
        raise Missed("more indices than dimensions")
    if not any(_is(element, ...) for element in elements):
        elements.append(ast.Constant(...))
    dims = list(value.dims)
    result: list[Dim] = []
    for element in elements:
        if _is(element, None):
            result.append(())
        elif _is(element, ...):
            count = len(value.dims) - taken
            result += dims[:count]
            del dims[:count]
        else:
            result += _taken(dims.pop(0), element, frame)
    return made(result)


def _taken(dim: Dim, index: ast.expr, frame: Frame[Value]) -> list[Dim]:
    """What is left of a dimension."""
    if isinstance(index, ast.Slice):
        lower = index.lower if index.upper is index.step is None else None
        if isinstance(lower, ast.UnaryOp) and isinstance(lower.op, ast.USub):
            if evaluate(lower.operand, frame) == Size(dim):
                return [dim]  # the last ones, as many as there are
        bounds = [bound for bound in (index.lower, index.upper, index.step) if bound is not None]
        values = [evaluate(bound, frame) for bound in bounds]
        if not bounds or (bounds == [index.upper] and values == [Size(dim)]):
            return [dim]
        for value in values:
            tensor_like(value)
    else:
        value = evaluate(index, frame)
        if value != SLICE:
            number = tensor_like(value)
            if is_positional(dim) or not isinstance(number, Plain):
                raise Missed("it picks positions by an index", code=Code.MIXES_POSITIONS)
            return []
    if is_positional(dim):
        raise Missed("it takes a part of the positions", code=Code.MIXES_POSITIONS)
    return [fresh()]


def check_written(owner: Tensor, target: ast.Subscript, value: Value, frame: Frame[Value]) -> None:
    """Raise Missed unless what is written has the positions of the part, or is the same for all of them."""
    part, value = _part(owner, target, frame), tensor_like(value)
    if not isinstance(part, Tensor) or not isinstance(value, Tensor | Plain):
        raise Missed("it writes to a part of a value", code=Code.IN_PLACE)
    both = broadcast(part, value)
    dims = both.dims if isinstance(both, Tensor) else ()
    if [*map(is_positional, dims)] != [*map(is_positional, part.dims)]:
        raise Missed("it writes positions to a part without positions", code=Code.IN_PLACE)


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value

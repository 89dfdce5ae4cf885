"""Normal forms of subscripts, sizes, parts of sequences and views."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from veomni_hook.patches.graph.arithmetic import branch
from veomni_hook.patches.graph.dtypes import SAME_SHAPE
from veomni_hook.patches.graph.nodes import Node, constant, is_constant

__all__ = ["ELLIPSIS", "NONE", "item", "length", "shape", "size", "sliced", "subscript"]

NONE = constant(None)
ELLIPSIS = constant(...)
_ZERO = constant(0)
# Operations whose result may be a list as well as a tensor.
_LIST_OR_TENSOR = ("call", "attribute", "argument", "global", "item", "getattr")


def item(sequence: Node, number: int, origin: ast.expr | None = None) -> Node:
    """``sequence[number]``: of a tuple, a shape, the parts of a tensor, or anything else."""
    op = sequence.op
    if op == "tuple" and all(argument.op != "star" for argument in sequence.args):
        if -len(sequence.args) <= number < len(sequence.args):
            return sequence.args[number]
    elif op == "branch" and all(arm.op in ("tuple", "chunk", "split") for arm in sequence.args[1:]):
        test, met, unmet = sequence.args
        return branch(test, item(met, number), item(unmet, number), origin)
    elif op == "shape":
        return size(sequence.args[0], constant(number), origin)
    elif op == "unbind":
        return select(sequence.args[0], sequence.args[1], constant(number), origin)
    elif op == "split" and (part := _part_of_split(sequence, number, origin)) is not None:
        return part
    return Node("item", (sequence, constant(number)), None, origin)


def select(tensor: Node, dim: Node, index: Node, origin: ast.expr | None = None) -> Node:
    """``tensor.select(dim, index)``."""
    if is_constant(dim, 0) and index.op == "constant":
        return Node("item", (tensor, index), None, origin)
    return Node("select", (tensor, dim, index), None, origin)


def sliced(tensor: Node, dim: Node, bounds: tuple[Node, Node, Node], origin: ast.expr | None = None) -> Node:
    """``tensor[start:stop:step]`` along one dimension; a start of 0 and a step of 1 are dropped."""
    start, stop, step = bounds
    start = NONE if is_constant(start, 0) else start
    step = NONE if is_constant(step, 1) else step
    if start == stop == step == NONE:
        return tensor
    return Node("slice", (tensor, dim, start, stop, step), None, origin)


def size(tensor: Node, dim: Node, origin: ast.expr | None = None) -> Node:
    """``tensor.shape[dim]``."""
    while tensor.op in SAME_SHAPE:
        tensor = tensor.args[0]
    return Node("size", (tensor, dim), None, origin)


def shape(tensor: Node, origin: ast.expr | None = None) -> Node:
    """``tensor.shape``."""
    while tensor.op in SAME_SHAPE:
        tensor = tensor.args[0]
    return Node("shape", (tensor,), None, origin)


def length(node: Node) -> int | None:
    """The number of elements of a sequence, if it is known."""
    if node.op == "tuple" and all(argument.op != "star" for argument in node.args):
        return len(node.args)
    return None


def subscript(value: Node, elements: Sequence[Node], *, single: bool, origin: ast.expr | None = None) -> Node:
    """``value[...]``.

    Args:
        value: the tensor or sequence that is indexed.
        elements: indices; a slice is ``bounds(start, stop, step)``.
        single: the subscript has no comma, so ``value`` may be a sequence instead of a tensor.
    """
    if single:
        (element,) = elements
        if element.op == "constant" and type(element.value) is int:
            return item(value, element.value, origin)
        if element.op == "bounds" and value.op in ("shape", "tuple", "bounds"):
            return _part_of_sequence(value, element, origin)
        if element.op == "bounds" and value.op in _LIST_OR_TENSOR:
            # Along the first dimension, slicing a list and slicing a tensor look the same.
            return sliced(value, _ZERO, _bounds(element), origin)
    if all(_is_basic(element) for element in elements):
        return _basic(value, elements, origin)
    return Node("index", (value, *elements), None, origin)


def _bounds(element: Node) -> tuple[Node, Node, Node]:
    start, stop, step = element.args
    return start, stop, step


def _is_basic(element: Node) -> bool:
    if element.op == "bounds":
        return True
    return element.op == "constant" and (element.value in (None, ...) or type(element.value) is int)


def _basic(value: Node, elements: Sequence[Node], origin: ast.expr | None) -> Node:
    """Slices, integers, None and an ellipsis: one operation for each dimension that changes."""
    split = elements.index(ELLIPSIS) if ELLIPSIS in elements else len(elements)
    if ELLIPSIS in elements[split + 1 :]:
        return Node("index", (value, *elements), None, origin)
    result, dim = value, 0
    for element in elements[:split]:
        result = _index_dimension(result, dim, element)
        dim += not _is_integer(element)
    dim = -1
    for element in reversed(elements[split + 1 :]):
        result = _index_dimension(result, dim, element)
        dim -= not _is_integer(element)
    return result if result is value else result.at(origin)


def _is_integer(element: Node) -> bool:
    """Whether a basic index removes its dimension."""
    return element.op == "constant" and element.value is not None


def _index_dimension(value: Node, dim: int, element: Node) -> Node:
    if element.op == "bounds":
        return sliced(value, constant(dim), _bounds(element))
    if element == NONE:
        return Node("unsqueeze", (value, constant(dim)))
    return select(value, constant(dim), element)


def _part_of_split(sequence: Node, number: int, origin: ast.expr | None) -> Node | None:
    """An element of ``split`` with two sizes, as a slice."""
    tensor, sizes, dim = sequence.args
    if sizes.op != "tuple" or len(sizes.args) != 2 or any(part.op == "star" for part in sizes.args):
        return None
    first = sizes.args[0]
    number %= 2
    bounds = (first, NONE, NONE) if number else (NONE, first, NONE)
    return sliced(tensor, dim, bounds, origin)


def _part_of_sequence(value: Node, element: Node, origin: ast.expr | None) -> Node:
    limits = [bound.value for bound in element.args if bound.op == "constant"]
    start, stop, step = (limit if type(limit) is int else None for limit in [*limits, *[None] * 3][:3])
    if len(limits) == 3 and length(value) is not None:
        return Node("tuple", value.args[start:stop:step], None, origin)
    return Node("part", (value, *element.args), None, origin)

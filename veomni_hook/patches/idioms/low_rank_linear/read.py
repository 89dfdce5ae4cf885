"""Reads a forward that adds the products of adapters, statement by statement."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.expressions import own_attribute
from veomni_hook.patches.code.walk import contains, walk_ast
from veomni_hook.patches.site import Missed

__all__ = ["Adapted", "is_candidate", "read"]


class Adapted(NamedTuple):
    """What a forward computes with.

    Attributes:
        first: the statement that calls the layer; all after it is known.
        x: the input's name.
        others: names of further arguments, which the layer gets.
        name: the loop's name for an adapter.
        base, active: attributes of the module: the layer, and the names of active adapters.
        dropout, down, up, scale, variants: attributes that are dictionaries by adapter.
    """

    first: ast.stmt
    x: str
    others: tuple[str, ...]
    name: str
    base: str
    active: str
    dropout: str
    down: str
    up: str
    scale: str
    variants: str


class _Sum(NamedTuple):
    """The names in ``up(down(dropout(x))) * scale``."""

    up: str
    down: str
    dropout: str
    x: str
    scale: str


def is_candidate(forward: FunctionNode) -> bool:
    """Return whether a loop of the function multiplies such a product by a scale, with names it looks up."""
    return any(_products(loop) for loop in walk_ast(forward) if isinstance(loop, ast.For))


def read(forward: FunctionNode) -> Adapted:
    """Return what a candidate computes with.

    Raises:
        Missed: a statement is not one that is known.
    """
    block, loop = _place(forward)
    (product,) = _products(loop)
    name = ast.unparse(loop.target)
    active = own_attribute(loop.iter)
    held = _looked_up(loop, name)
    if not active or set(product) - {product.x} - set(held):
        raise Missed("the loop is over something else, or looks adapters up in another way", loop)
    parameters = forward.args
    arguments = [*parameters.posonlyargs, *parameters.args]
    others = tuple(each.arg for each in (parameters.vararg, parameters.kwarg) if each is not None)
    if len(arguments) != 2 or arguments[0].arg != "self" or arguments[1].arg != product.x:
        raise Missed(f"its arguments are not self and {product.x}", forward)
    result, base, first = _base_call(block[: block.index(loop)], product.x, others, loop)
    keys = _known_before(block[block.index(first) + 1 : block.index(loop)], result, held[product.down])
    variants = _read_loop(loop, product, held, result, keys)
    _read_end(forward, block, loop, result)
    return Adapted(
        first,
        product.x,
        others,
        name,
        base,
        active,
        dropout=held[product.dropout],
        down=held[product.down],
        up=held[product.up],
        scale=held[product.scale],
        variants=variants,
    )


def _place(forward: FunctionNode) -> tuple[list[ast.stmt], ast.For]:
    """The block that contains the loop, and the loop; only branches may be around it."""
    block: list[ast.stmt] = forward.body
    while True:
        loops = [each for each in block if isinstance(each, ast.For) and _products(each)]
        if len(loops) == 1 and len(_products(loops[0])) == 1:
            return block, loops[0]
        inner = [
            one
            for each in block
            if isinstance(each, ast.If)
            for one in (each.body, each.orelse)
            if any(isinstance(node, ast.For) and _products(node) for step in one for node in walk_ast(step))
        ]
        if len(inner) != 1:
            raise Missed("there is no single loop that adds products of adapters", forward)
        block = inner[0]


def _products(loop: ast.AST) -> list[_Sum]:
    held = set(_looked_up(loop, ast.unparse(loop.target))) if isinstance(loop, ast.For) else set()
    found = (_as_product(node) for node in walk_ast(loop))
    return [each for each in found if each is not None and {each.up, each.down, each.scale} <= held]


def _as_product(node: ast.AST) -> _Sum | None:
    if not (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Name)
    ):
        return None
    names, value = [], node.left
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and len(value.args) == 1:
        if value.keywords:
            return None
        names.append(value.func.id)
        value = value.args[0]
    if len(names) != 3 or not isinstance(value, ast.Name):
        return None
    up, down, dropout = names
    return _Sum(up, down, dropout, value.id, node.right.id)


def _looked_up(loop: ast.AST, name: str) -> dict[str, str]:
    """Locals of the loop's body that are ``self.attribute[name]``, with the attribute."""
    found = {}
    for node in getattr(loop, "body", ()):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and len(node.targets) == 1:
            attribute = own_attribute(node.value.value)
            if attribute and ast.unparse(node.value.slice) == name:
                found[ast.unparse(node.targets[0])] = attribute
    return found


def _base_call(
    before: Sequence[ast.stmt], x: str, others: tuple[str, ...], loop: ast.For
) -> tuple[str, str, ast.stmt]:
    """The name of the result, the attribute of the layer, and the statement that calls it."""
    arguments = ", ".join([x, *(f"{star}{name}" for star, name in zip(("*", "**"), others, strict=False))])
    for statement in reversed(before):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            base = own_attribute(statement.value.func)
            called = base and ast.unparse(statement.value) == f"self.{base}({arguments})"
            if called and isinstance(statement.targets[0], ast.Name):
                return statement.targets[0].id, base, statement
    raise Missed(f"the layer is not called with ({arguments}) before the loop", loop)


def _known_before(between: Sequence[ast.stmt], result: str, down: str) -> set[str]:
    """What names the adapters with a ``down``; all statements between call and loop must be known."""
    keys = {f"self.{down}", f"self.{down}.keys()"}
    for statement in between:
        text = ast.unparse(statement)
        target = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
        if text == f"{target} = self.{down}.keys()":
            keys.add(target)
        elif text not in (f"{result} = {result}.clone()", f"{target} = {result}.dtype"):
            raise Missed(f"unknown before the loop: {text}", statement)
    return keys


def _read_loop(loop: ast.For, names: _Sum, held: dict[str, str], result: str, keys: set[str]) -> str:
    """The attribute with the adapters that are something else."""
    name = ast.unparse(loop.target)
    first, *body = loop.body
    if loop.orelse or ast.unparse(first) not in {f"if {name} not in {each}:\n    continue" for each in keys}:
        raise Missed("the loop does not begin by skipping adapters that the layer has not", first)
    rest = [each for each in body if not (isinstance(each, ast.Assign) and _is_lookup(each, held))]
    cast = f"{names.x} = self._cast_input_dtype({names.x}, {names.down}.weight.dtype)"
    converts = [text for each in rest[:-1] for text in _steps(each, result)]
    if not rest or not isinstance(rest[-1], ast.If) or converts != [cast]:
        raise Missed("the loop has other statements", loop)
    branch = rest[-1]
    variants = own_attribute(branch.test.comparators[0]) if isinstance(branch.test, ast.Compare) else ""
    if not variants or ast.unparse(branch.test) != f"{name} not in self.{variants}" or not branch.orelse:
        raise Missed("it does not ask whether the adapter is a variant", branch)
    product = f"{names.up}({names.down}({names.dropout}({names.x}))) * {names.scale}"
    texts = [text for each in branch.body for text in _steps(each, result)]
    whole = [f"{result} = {result} + {product}"]
    if texts != whole and not _in_two_steps(texts, result, product):
        raise Missed("the product is added in another way", branch)
    return variants


def _in_two_steps(texts: list[str], result: str, product: str) -> bool:
    output = texts[0].partition(" = ")[0] if texts else ""
    return texts == [f"{output} = {product}", f"{result} = {result} + {output}"]


def _is_lookup(node: ast.Assign, held: dict[str, str]) -> bool:
    return ast.unparse(node.targets[0]) in held


def _steps(statement: ast.stmt, result: str) -> Iterator[str]:
    """The text of a statement, without the conversions of layers that leave them to autocast."""
    text = ast.unparse(statement)
    if text == "requires_conversion = not torch.is_autocast_enabled()":
        return
    if (
        isinstance(statement, ast.If)
        and text.startswith("if requires_conversion:\n")
        and not statement.orelse
    ):
        for each in statement.body:
            inner = ast.unparse(each)
            if inner not in (f"expected_dtype = {result}.dtype", "output = output.to(expected_dtype)"):
                yield inner
        return
    yield text


def _read_end(forward: FunctionNode, block: Sequence[ast.stmt], loop: ast.For, result: str) -> None:
    """Raise Missed unless the result is returned after the loop, at most in another dtype."""
    rest = [ast.unparse(each) for each in block[list(block).index(loop) + 1 :]]
    end = f"return {result}"
    if block is not forward.body:
        if not contains(forward.body[-2], loop) or ast.unparse(forward.body[-1]) != end:
            raise Missed("its result is not what it returns", forward)
    elif not rest or rest.pop() != end:
        raise Missed("its result is not what it returns", forward)
    if len(rest) > 1 or any(not text.startswith(f"{result} = {result}.to(") for text in rest):
        raise Missed("the result is changed after the loop", loop)

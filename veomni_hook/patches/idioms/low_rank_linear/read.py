"""Reads a forward that adds the products of adapters: the statements that it may consist of."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.template import Found, Mismatch, Template, branches
from veomni_hook.patches.code.walk import contains, walk_ast
from veomni_hook.patches.site import Missed

__all__ = ["is_candidate", "read"]

#: What a loop adds, and how it looks up the factors.
PRODUCT = Template("UP(DOWN(DROPOUT(X))) * SCALE")
LOOKED_UP = Template("LOCAL = self.ATTRIBUTE[NAME]")
RETURNED = Template("return RESULT")
#: From the layer's call to the end of the block.
FORWARD = Template(
    """
RESULT = self.BASE(X, *ARGS, **KWARGS)
while some:
    RESULT = RESULT.clone()
    DTYPE = RESULT.dtype
    KEYS = self.DOWNS.keys()
for NAME in self.ACTIVE:
    if either:
        if NAME not in self.DOWNS:
            continue
    elif either:
        if NAME not in self.DOWNS.keys():
            continue
    else:
        if NAME not in KEYS:
            continue
    while some:
        DOWN = self.DOWNS[NAME]
        UP = self.UPS[NAME]
        DROPOUT = self.DROPOUTS[NAME]
        SCALE = self.SCALES[NAME]
    if either:
        CONVERTS = not torch.is_autocast_enabled()
        if CONVERTS:
            EXPECTED = RESULT.dtype
            X = self._cast_input_dtype(X, DOWN.weight.dtype)
    else:
        X = self._cast_input_dtype(X, DOWN.weight.dtype)
    if NAME not in self.VARIANTS:
        if either:
            OUTPUT = UP(DOWN(DROPOUT(X))) * SCALE
            if maybe:
                if CONVERTS:
                    OUTPUT = OUTPUT.to(EXPECTED)
            RESULT = RESULT + OUTPUT
        else:
            RESULT = RESULT + UP(DOWN(DROPOUT(X))) * SCALE
    else:
        ...
if maybe:
    RESULT = RESULT.to(*DTYPES, **OPTIONS)
if maybe:
    return RESULT
"""
)


def is_candidate(forward: FunctionNode) -> bool:
    """Return whether a loop of the function multiplies such a product by a scale, with names it looks up."""
    return any(_adds_products(loop) for loop in walk_ast(forward) if isinstance(loop, ast.For))


def read(forward: FunctionNode) -> Found:
    """Return what a candidate computes with: `FORWARD`, from the call of the layer.

    Raises:
        Missed: a statement is not one that is known.
    """
    parameters = forward.args
    arguments = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
    if len(arguments) != 2 or arguments[0] != "self":
        raise Missed("its arguments are not self and one input", forward)
    found = FORWARD.find(branches(forward.body), X=arguments[1])
    if isinstance(found, Mismatch):
        raise Missed(str(found), found.node or forward)
    others = [
        f"{star}{each.arg}" if each else ""
        for star, each in zip(("*", "**"), (parameters.vararg, parameters.kwarg), strict=False)
    ]
    if [found["ARGS"], found["KWARGS"]] != others:
        raise Missed("the layer does not get the other arguments", found.first)
    last = RETURNED.match(forward.body[-1])
    if (
        last is None
        or last["RESULT"] != found["RESULT"]
        or not (found.block is forward.body or contains(forward.body[-2], found.first))
    ):
        raise Missed("its result is not what it returns", forward)
    return found


def _adds_products(loop: ast.For) -> bool:
    name = getattr(loop.target, "id", "")
    looked_up = [one for one in map(LOOKED_UP.match, loop.body) if one and one["NAME"] == name]
    names = {one["LOCAL"] for one in looked_up}
    products = filter(None, map(PRODUCT.match, walk_ast(loop)))
    return any({one["UP"], one["DOWN"], one["SCALE"]} <= names for one in products)

"""Linear layers with low-rank adapters, as PEFT's LoRA has them.

A forward calls the layer that the module holds, and then, in a loop over the names of active adapters, adds
``up(down(dropout(x))) * scale``, each taken by name from a dictionary of the module. The guard is in front of
the call, and passes what the loop would look up. If a statement from there to the ``return`` is not one of
`FORWARD`, the place is a miss, and nothing is changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.template import Found, Mismatch, Template, branches
from veomni_hook.patches.code.tree import contains, walk_ast
from veomni_hook.patches.routes.guards import ask, before_statement
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "low_rank_linear"
WORDS = ""
CANDIDATES = (
    "every forward with a loop that multiplies up(down(dropout(x))) by a scale, all of which it looks up "
    "in dictionaries of the module"
)

_VARIANT = "product_added"
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
#: The kernel's operands, with the same names.
OPERANDS = (
    "{X}",
    "self.{BASE}",
    """[
        (
            self.{DROPOUTS}[{NAME}],
            self.{DOWNS}[{NAME}],
            self.{UPS}[{NAME}],
            self.{SCALES}[{NAME}],
            self.{VARIANTS}.get({NAME}),
        )
        for {NAME} in self.{ACTIVE}
        if {NAME} in self.{DOWNS}
    ]""",
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every forward with such a loop, also in classes that are defined under a condition."""
    for owner in _classes(view.document.tree.body):
        forward = view.methods(owner).get("forward")
        if not isinstance(forward, ast.FunctionDef) or not _adds_products(forward):
            continue
        target = f"{owner.name}.forward"
        try:
            match = _read(forward)
        except Missed as missed:
            yield Site(OP, target, Status.MISSED, reason=missed.reason, lineno=forward.lineno)
            continue
        others = [match[rest].lstrip("*") for rest in ("ARGS", "KWARGS") if match[rest]]
        tests = [f"not ({' or '.join(others)})"] if others else []
        operands = [operand.format_map(match) for operand in OPERANDS]
        code = ask(forward, slot_name(OP, _VARIANT), "self", operands, tests)
        edits = before_statement(view, forward, match.first, code, f"{OP}/{_VARIANT}")
        yield Site.asking(OP, target, _VARIANT, forward, edits)


def _classes(body: list[ast.stmt]) -> Iterator[ast.ClassDef]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node
        elif isinstance(node, ast.If):
            yield from _classes([*node.body, *node.orelse])


def _adds_products(forward: FunctionNode) -> bool:
    """Whether a loop multiplies a product by a scale, with names that it looks up."""
    for loop in (node for node in walk_ast(forward) if isinstance(node, ast.For)):
        looked_up = [one for one in map(LOOKED_UP.match, loop.body) if one is not None]
        names = {one["LOCAL"] for one in looked_up if one["NAME"] == getattr(loop.target, "id", "")}
        for product in filter(None, map(PRODUCT.match, walk_ast(loop))):
            if {product["UP"], product["DOWN"], product["SCALE"]} <= names:
                return True
    return False


def _read(forward: FunctionNode) -> Found:
    """What a candidate computes with: `FORWARD`, from the call of the layer.

    Raises:
        Missed: a statement is not one that is known.
    """
    parameters = forward.args
    arguments = [argument.arg for argument in (*parameters.posonlyargs, *parameters.args)]
    if len(arguments) != 2 or arguments[0] != "self":
        raise Missed("its arguments are not self and one input", forward, Code.OTHER_ARGUMENTS)
    match = FORWARD.find(branches(forward.body), X=arguments[1])
    if isinstance(match, Mismatch):
        raise Missed(str(match), match.node or forward, Code.OTHER_FORM)
    others = [("*", parameters.vararg), ("**", parameters.kwarg)]
    if [match["ARGS"], match["KWARGS"]] != [
        f"{star}{parameter.arg}" if parameter else "" for star, parameter in others
    ]:
        raise Missed("the layer does not get the other arguments", match.first, Code.OTHER_ARGUMENTS)
    last = RETURNED.match(forward.body[-1])
    if (
        last is None
        or last["RESULT"] != match["RESULT"]
        or not (match.block is forward.body or contains(forward.body[-2], match.first))
    ):
        raise Missed("its result is not what it returns", forward, Code.OTHER_FORM)
    return match

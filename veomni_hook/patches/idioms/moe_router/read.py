"""The formulas of routers, and what upstream writes differently for the same.

Spellings that are equivalent for ``[tokens, experts]`` get one form, so that each variant has few patterns.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.graph import (
    ANY,
    FLOAT32,
    FUNCTION,
    NUMBER,
    Difference,
    Form,
    Match,
    Node,
    Rule,
    Unknown,
    constant,
    decided,
    dtype_of,
    match,
    rebuild,
    reference_form,
    renormalised,
    specific_first,
    walk,
)
from veomni_hook.patches.routes.view import Method
from veomni_hook.patterns import pattern_file

__all__ = [
    "OP",
    "REFERENCE",
    "RULES",
    "Pattern",
    "Routing",
    "flat",
    "form_of_locals",
    "is_by_number",
    "is_matrix",
    "patterns",
]

OP = "moe_router"
REFERENCE = pattern_file(OP)
# The position of the dimension in these operations' arguments.
_DIM = {"softmax": 1, "topk": 2, "gather": 1, "sum": 1}
_SAME_RANK = ("linear", "cast", "mul", "div", "softmax", "sigmoid", "tanh")
_PARTS = ("values", "indices")


def _is_flag(node: Node) -> bool:
    return node.op in ("attribute", "argument") or (node.op == "constant" and type(node.value) is bool)


def _is_function(node: Node) -> bool:
    # `logits.sigmoid()` names no function, but torch has one.
    return FUNCTION.accepts(node) or (node.op == "global" and str(node.value).startswith("torch."))


def _is_float32(node: Node) -> bool:
    # Under autocast, the product of two tensors in float32 is not: the guard asks for the dtype.
    return all(dtype_of(each) == FLOAT32 for each in (node.args[:2] if node.op == "linear" else (node,)))


_FLAG = Rule("a flag", _is_flag)
_FLOAT32 = Rule("logits in float32", _is_float32)
#: What operands may match, by their names.
RULES = {
    "router_logits": ANY,
    "bias": ANY,
    "fill": ANY,
    "score": Rule("a function", _is_function),
    "normalise": _FLAG,
    "sorted_": _FLAG,
    **dict.fromkeys(("top_k", "num_experts", "num_group", "topk_group", "epsilon"), NUMBER),
}


@dataclass(frozen=True)
class Pattern:
    """A variant's formula; ``fixed`` are flags and numbers with a known value in it.

    ``uncast``: it does not cast the logits, so that it is the variant's for logits in float32 alone.
    """

    variant: str
    node: Node
    fixed: tuple[tuple[str, bool | float], ...] = ()
    uncast: bool = False

    def match(self, pair: Node, *, whole: bool) -> Match | Difference:
        """What the operands are in weights and indices, or the first difference.

        ``whole``: they are of all code before, so that the dtype of the logits is known.
        """
        rules = RULES | {"router_logits": _FLOAT32} if self.uncast and whole else RULES
        return match(self.node, pair, rules)


@dataclass(frozen=True)
class Routing:
    """A run that computes weights and indices, and the locals that hold them at its end.

    ``pair`` is upstream's formula, ``inlined`` the functions of the file that it calls. ``rest`` is what the
    last statement then does to the weights. ``flat``: the code uses dimension 1, which is the last dimension
    only for ``[tokens, experts]``.
    """

    run: Run
    pattern: Pattern
    weights: str
    indices: str
    bindings: Mapping[str, Node]
    pair: Node
    inlined: tuple[str, ...]
    rest: ast.stmt | None = None
    flat: bool = False


@cache
def patterns() -> tuple[Pattern, ...]:
    """Every variant's formula, plus versions with each value of the flag, and without epsilon or cast."""
    found = []
    for variant in specific_first(OP):
        form = reference_form(REFERENCE, variant)
        node = flat(form.result)
        found.append(Pattern(variant, node))
        if "normalise" in form.arguments:
            test = Node("argument", (), "normalise")
            for outcome in (True, False):
                found.append(
                    Pattern(variant, decided(node, test, outcome=outcome), (("normalise", outcome),))
                )
        if "epsilon" in form.arguments:
            found.append(Pattern(variant, rebuild(node, _without_epsilon, renormalised), (("epsilon", 0.0),)))
    uncast = (replace(one, node=rebuild(one.node, _without_cast, renormalised), uncast=True) for one in found)
    return (*found, *(one for one in uncast if all(one.node != other.node for other in found)))


def _without_cast(node: Node) -> Node | None:
    is_cast = node.op == "cast" and node.args == (Node("argument", (), "router_logits"), FLOAT32)
    return node.args[0] if is_cast else None


def _without_epsilon(node: Node) -> Node | None:
    is_sum = node.op == "add" and node.args[1] == Node("argument", (), "epsilon")
    return node.args[0] if is_sum else None


def flat(node: Node, *, prove: bool = True) -> Node:
    """Normalise spellings that are equivalent for ``[tokens, experts]``.

    The last dimension becomes -1, a softmax in another dtype a softmax of a cast, a named part of a result a
    numbered one, and an in-place division by the sum an out-of-place one.

    Args:
        prove: keep the dimensions of tensors that may have more than two.
    """
    done: dict[bytes, Node] = {}

    def visit(current: Node) -> Node:
        if current.key not in done:
            args = tuple(visit(argument) for argument in current.args)
            made = Node(current.op, args, current.value, current.origin)
            done[current.key] = _spelled(made, prove=prove)
        return done[current.key]

    return visit(node)


def _spelled(node: Node, *, prove: bool) -> Node:
    args = list(node.args)
    place = _DIM.get(node.op)
    if place is not None and args[place] == constant(1) and not (prove and _reshaped(args[0])):
        args[place] = constant(-1)
    if node.op == "softmax":
        if args[2] == dtype_of(args[0]):
            args[2] = constant(None)
        elif args[2].op == "global":
            args[0], args[2] = renormalised(Node("cast", (args[0], args[2]))), constant(None)
    if node.op == "getattr" and args[0].op == "topk" and node.value in _PARTS:
        return Node("item", (args[0], constant(_PARTS.index(str(node.value)))), None, node.origin)
    if node.op == "cast" and args[0].op == "div" and args[1] == dtype_of(args[0].args[0]):
        return args[0]
    return renormalised(Node(node.op, tuple(args), node.value, node.origin))


def is_matrix(node: Node) -> bool:
    """Whether logits are known to be ``[tokens, experts]``: they come from a reshape to two dimensions."""
    if node.op == "reshape":
        return node.args[1].op == "tuple" and len(node.args[1].args) == 2
    if node.op == "call":
        return len(node.args) == 2 and is_matrix(node.args[1])
    return node.op in _SAME_RANK and is_matrix(node.args[0])


def is_by_number(node: Node) -> bool:
    """Whether an operation uses dimension 1, which is the last one of a matrix."""
    place = _DIM.get(node.op)
    return place is not None and node.args[place] == constant(1)


def _reshaped(node: Node) -> bool:
    # If the tensor has more dimensions, dimension 1 is not the last one.
    return any(inner.op in ("reshape", "expand", "unsqueeze", "unflatten", "index") for inner in walk(node))


def form_of_locals(method: Method, run: Run, names: Sequence[str]) -> Form | Unknown:
    """What a run computes in the locals ``names``, as a tuple."""
    result = ast.Tuple([ast.Name(name, ast.Load()) for name in names], ast.Load())
    last = ast.copy_location(ast.Return(result), run.statements[-1])
    return method.form_of(Run(method.method, [*run.statements, last], 0, len(run.statements)))

"""Match a formula against what a function computes.

The arguments of the pattern are its holes. A `Rule` restricts what a hole matches; a hole that occurs twice
must match equal nodes. Operands of sums and products match in either order.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from veomni_hook.patches.graph.forms import Form
from veomni_hook.patches.graph.nodes import COMMUTATIVE, Node, constant, walk
from veomni_hook.patches.graph.printing import brief, can_be_said

__all__ = [
    "ANY",
    "ARGUMENT",
    "ATTRIBUTE",
    "FUNCTION",
    "NUMBER",
    "TENSOR",
    "Difference",
    "Match",
    "Rule",
    "find",
    "match",
]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a hole may match.

    Attributes:
        words: what is expected, for messages: ``an attribute``.
        accepts: whether a node may fill the hole.
    """

    words: str
    accepts: Callable[[Node], bool]


def _is_number(node: Node) -> bool:
    return node.op == "attribute" or (node.op == "constant" and type(node.value) in (int, float))


ANY = Rule("anything", lambda node: True)
ARGUMENT = Rule("an argument", lambda node: node.op == "argument")
ATTRIBUTE = Rule("an attribute of self", lambda node: node.op == "attribute")
#: A parameter, a buffer or an argument.
TENSOR = Rule("an argument or an attribute of self", lambda node: node.op in ("argument", "attribute"))
#: A number: an attribute of self or a literal.
NUMBER = Rule("an attribute of self or a number", _is_number)
#: A callable with code for the start of a function: ``self.act_fn``, ``F.silu``, ``ACT2FN[self.act]``.
FUNCTION = Rule("a function", lambda node: node.op not in ("argument", "constant") and can_be_said(node))


@dataclass(frozen=True, slots=True)
class Match:
    """A match of a formula: the node, and the nodes that fill the holes."""

    node: Node
    bindings: Mapping[str, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a formula differs from the code.

    Attributes:
        text: what was expected and what was found, with the line.
        depth: the fraction of the pattern that matched before; the nearest formula has the highest.
        lineno: the upstream line.
    """

    text: str
    depth: float
    lineno: int = 0


# Functions of one tensor that may match where a pattern calls a hole.
_UNARY = {
    "silu": ("torch.nn.functional.silu", ()),
    "gelu": ("torch.nn.functional.gelu", (constant("none"),)),
    "relu": ("torch.relu", ()),
    "sigmoid": ("torch.sigmoid", ()),
    "tanh": ("torch.tanh", ()),
    "softplus": ("torch.nn.functional.softplus", (constant(1), constant(20))),
}

# Holes by name, and nodes of the pattern by key, to the nodes that they match.
_Bound = dict["str | bytes", Node]


def match(
    pattern: Form | Node, found: Form | Node, rules: Mapping[str, Rule] | None = None
) -> Match | Difference:
    """Match a formula against a form.

    Args:
        pattern: the formula; its arguments are holes.
        found: what a function computes. If both are forms, the effects have to match, too.
        rules: what each hole may match; anything if it has no rule.
    """
    matcher = _Matcher(rules or {})
    pairs = [(_result(pattern), _result(found))]
    if isinstance(pattern, Form) and isinstance(found, Form):
        if len(pattern.effects) != len(found.effects):
            effect = (found.effects or pattern.effects)[0]
            return Difference(
                f"expected {len(pattern.effects)} effects, found {brief(effect)} (line {effect.lineno})", 0
            )
        pairs += zip(pattern.effects, found.effects, strict=True)
    for bound in matcher.all(pairs, {}):
        return Match(_result(found), {name: node for name, node in bound.items() if isinstance(name, str)})
    size = sum(1 for _ in walk(*(one for one, _ in pairs)))
    return Difference(matcher.text, min(matcher.matched / max(size, 1), 0.99), matcher.lineno)


def find(
    pattern: Form | Node, where: Form | Node, rules: Mapping[str, Rule] | None = None
) -> Iterator[Match]:
    """Every node of a form that a formula matches, outermost first, including effects and all branches."""
    wanted = _result(pattern)
    roots = (where.result, *where.effects) if isinstance(where, Form) else (where,)
    for node in walk(*roots):
        if node.op == wanted.op or wanted.op in ("argument", "call"):
            made = match(wanted, node, rules)
            if isinstance(made, Match):
                yield made


def _result(form: Form | Node) -> Node:
    return form.result if isinstance(form, Form) else form


class _Matcher:
    """One search; it remembers the difference at the furthest point."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self.begun = 0
        self.matched = -1
        self.place = 0
        self.text = ""
        self.lineno = 0

    def all(self, pairs: list[tuple[Node, Node]], bound: _Bound) -> Iterator[_Bound]:
        """Every way in which all pairs match together."""
        if not pairs:
            yield bound
            return
        for one in self.one(*pairs[0], bound):
            yield from self.all(pairs[1:], one)

    def one(self, pattern: Node, found: Node, bound: _Bound) -> Iterator[_Bound]:
        """Every way in which a node of the pattern matches a node."""
        known = bound.get(pattern.key)
        if known is not None:
            if known == found:
                yield bound
            else:
                self.fail(known, found, bound)
            return
        self.begun += 1
        if found.origin is not None:
            self.place = found.origin.lineno
        for made in self.new(pattern, found, bound):
            self.begun -= 1
            yield {**made, pattern.key: found}
            self.begun += 1
        self.begun -= 1

    def new(self, pattern: Node, found: Node, bound: _Bound) -> Iterator[_Bound]:
        if pattern.op == "argument":
            yield from self.hole(pattern, found, bound)
            return
        number = pattern.args[0] if pattern.op == "cast" else None
        if number is not None and number.op == "argument" and found.op == "constant":
            # Upstream casts a named number, but not a literal.
            if self.rules.get(str(number.value)) is NUMBER:
                yield from self.hole(number, found, bound)
                return
        if pattern.op == "call" and pattern.args[0].op == "argument" and found.op in _UNARY:
            yield from self.unary(pattern, found, bound)
            return
        same = pattern.op == found.op and _static(pattern) == _static(found)
        if not same or len(pattern.args) != len(found.args):
            self.fail(pattern, found, bound)
            return
        yield from self.all(list(zip(pattern.args, found.args, strict=True)), bound)
        if pattern.op in COMMUTATIVE:
            yield from self.all(list(zip(pattern.args, reversed(found.args), strict=True)), bound)

    def hole(self, pattern: Node, found: Node, bound: _Bound) -> Iterator[_Bound]:
        name = str(pattern.value)
        rule = self.rules.get(name, ANY)
        known = bound.get(name)
        if known is not None and known != found:
            self.fail(known, found, bound)
        elif not rule.accepts(found):
            self.fail(pattern, found, bound, f"{rule.words} as {name}")
        else:
            yield {**bound, name: found}

    def unary(self, pattern: Node, found: Node, bound: _Bound) -> Iterator[_Bound]:
        path, rest = _UNARY[found.op]
        if len(pattern.args) != 2 or found.args[1:] != rest:
            self.fail(pattern, found, bound)
            return
        callee = Node("global", (), path, _function_of(found, path))
        yield from self.all([(pattern.args[0], callee), (pattern.args[1], found.args[0])], bound)

    def fail(self, pattern: Node, found: Node, bound: _Bound, words: str = "") -> None:
        """Remember a difference if more was matched before it than before."""
        matched = sum(isinstance(key, bytes) for key in bound) + self.begun - 1
        if matched > self.matched:
            self.matched = matched
            self.lineno = found.lineno or self.place
            line = f" (line {self.lineno})" if self.lineno else ""
            self.text = f"expected {words or brief(pattern)}, found {brief(found)}{line}"


def _static(node: Node) -> object:
    # The serial number of a call is not part of a formula.
    if node.op == "call" and isinstance(node.value, tuple):
        return node.value[:2]
    return type(node.value), node.value


def _function_of(node: Node, path: str) -> ast.expr | None:
    """The function that upstream calls for ``node``; None for a method and for a function that does more."""
    call = node.origin
    alone = isinstance(call, ast.Call) and len(call.args) + len(call.keywords) == 1
    if not isinstance(call, ast.Call) or not alone or "followed" in node.facts:
        return None
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
    return call.func if name == path.rpartition(".")[2] else None

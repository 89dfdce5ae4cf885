"""Compare forms: match a formula, find it in a form, the formulas that tests choose between, digests."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from veomni_hook.patches.graph.nodes import (
    COMMUTATIVE,
    Form,
    Node,
    brief,
    constant,
    has_source,
    rebuild,
    walk,
)
from veomni_hook.patches.graph.normal_forms import renormalised
from veomni_hook.patches.reasons import Code, Reason

__all__ = [
    "ANY",
    "ARGUMENT",
    "ATTRIBUTE",
    "FUNCTION",
    "NUMBER",
    "TENSOR",
    "Difference",
    "Leaf",
    "Match",
    "Rule",
    "branches",
    "decided",
    "digest",
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
FUNCTION = Rule("a function", lambda node: node.op not in ("argument", "constant") and has_source(node))


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

    @property
    def why(self) -> Reason:
        """The difference as the reason of a site."""
        return Reason(self.text, Code.OTHER_FORM)


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
    pattern: Form | Node, subject: Form | Node, rules: Mapping[str, Rule] | None = None
) -> Match | Difference:
    """Match a formula against a form.

    Args:
        pattern: the formula; its arguments are holes.
        subject: what a function computes. If both are forms, the effects have to match, too.
        rules: what each hole may match; anything if it has no rule.
    """
    matcher = _Matcher(rules or {})
    pairs = [(_result(pattern), _result(subject))]
    if isinstance(pattern, Form) and isinstance(subject, Form):
        if len(pattern.effects) != len(subject.effects):
            effect = (subject.effects or pattern.effects)[0]
            return Difference(
                f"expected {len(pattern.effects)} effects, found {brief(effect)} (line {effect.lineno})", 0
            )
        pairs += zip(pattern.effects, subject.effects, strict=True)
    for bound in matcher.match_all(pairs, {}):
        return Match(_result(subject), {name: node for name, node in bound.items() if isinstance(name, str)})
    size = sum(1 for _ in walk(*(node for node, _ in pairs)))
    return Difference(matcher.text, min(matcher.matched / max(size, 1), 0.99), matcher.lineno)


def find(
    pattern: Form | Node, where: Form | Node, rules: Mapping[str, Rule] | None = None
) -> Iterator[Match]:
    """Every node of a form that a formula matches, outermost first, including effects and all branches."""
    formula = _result(pattern)
    for node in walk(*_roots(where)):
        if node.op == formula.op or formula.op in ("argument", "call"):
            result = match(formula, node, rules)
            if isinstance(result, Match):
                yield result


def _result(form: Form | Node) -> Node:
    return form.result if isinstance(form, Form) else form


def _roots(form: Form | Node) -> tuple[Node, ...]:
    return (form.result, *form.effects) if isinstance(form, Form) else (form,)


@dataclass(eq=False)
class _Matcher:
    """One search.

    Attributes:
        open: the number of pattern nodes around the current one whose operands are being matched.
        line: the upstream line of the last node that has one.
        matched: the number of pattern nodes that matched before the furthest difference.
        text: this difference; ``lineno``: its line.
    """

    rules: Mapping[str, Rule]
    open: int = 0
    line: int = 0
    matched: int = -1
    text: str = ""
    lineno: int = 0

    def match_all(self, pairs: list[tuple[Node, Node]], bound: _Bound) -> Iterator[_Bound]:
        """Every way in which all pairs match together."""
        if not pairs:
            yield bound
            return
        for with_first in self.match(*pairs[0], bound):
            yield from self.match_all(pairs[1:], with_first)

    def match(self, pattern: Node, node: Node, bound: _Bound) -> Iterator[_Bound]:
        """Every way in which a node of the pattern matches a node."""
        known = bound.get(pattern.key)
        if known is not None:
            if known == node:
                yield bound
            else:
                self.fail(known, node, bound)
            return
        self.open += 1
        if node.origin is not None:
            self.line = node.origin.lineno
        for extended in self.match_new(pattern, node, bound):
            self.open -= 1
            yield {**extended, pattern.key: node}
            self.open += 1
        self.open -= 1

    def match_new(self, pattern: Node, node: Node, bound: _Bound) -> Iterator[_Bound]:
        """The same for a node of the pattern that no node is bound to."""
        if pattern.op == "argument":
            yield from self.fill(pattern, node, bound)
            return
        number = pattern.args[0] if pattern.op == "cast" else None
        if number is not None and number.op == "argument" and node.op == "constant":
            # Upstream casts a named number, but not a literal.
            if self.rules.get(str(number.value)) is NUMBER:
                yield from self.fill(number, node, bound)
                return
        if pattern.op == "call" and pattern.args[0].op == "argument" and node.op in _UNARY:
            yield from self.match_function(pattern, node, bound)
            return
        same = pattern.op == node.op and _static(pattern) == _static(node)
        if not same or len(pattern.args) != len(node.args):
            self.fail(pattern, node, bound)
            return
        yield from self.match_all(list(zip(pattern.args, node.args, strict=True)), bound)
        if pattern.op in COMMUTATIVE:
            yield from self.match_all(list(zip(pattern.args, reversed(node.args), strict=True)), bound)

    def fill(self, hole: Node, node: Node, bound: _Bound) -> Iterator[_Bound]:
        """Fill a hole with a node, if its rule accepts it."""
        name = str(hole.value)
        rule = self.rules.get(name, ANY)
        known = bound.get(name)
        if known is not None and known != node:
            self.fail(known, node, bound)
        elif not rule.accepts(node):
            self.fail(hole, node, bound, f"{rule.words} as {name}")
        else:
            yield {**bound, name: node}

    def match_function(self, pattern: Node, node: Node, bound: _Bound) -> Iterator[_Bound]:
        """Match a call of a hole with an operation on one tensor: the hole gets torch's function."""
        path, rest = _UNARY[node.op]
        if len(pattern.args) != 2 or node.args[1:] != rest:
            self.fail(pattern, node, bound)
            return
        call, function = node.origin, None
        if isinstance(call, ast.Call) and len(call.args) + len(call.keywords) == 1:
            # Upstream's own function; none for a method, and for a function that does more.
            name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
            alone = name == path.rpartition(".")[2] and "followed" not in node.facts
            function = call.func if alone else None
        callee = Node("global", (), path, function)
        yield from self.match_all([(pattern.args[0], callee), (pattern.args[1], node.args[0])], bound)

    def fail(self, pattern: Node, node: Node, bound: _Bound, words: str = "") -> None:
        """Remember a difference if more was matched before it than before."""
        matched = sum(isinstance(key, bytes) for key in bound) + self.open - 1
        if matched > self.matched:
            self.matched = matched
            self.lineno = node.lineno or self.line
            line = f" (line {self.lineno})" if self.lineno else ""
            self.text = f"expected {words or brief(pattern)}, found {brief(node)}{line}"


def _static(node: Node) -> object:
    # The serial number of a call is not part of a formula.
    if node.op == "call" and isinstance(node.value, tuple):
        return node.value[:2]
    return type(node.value), node.value


_MOST_TESTS = 6


@dataclass(frozen=True, slots=True)
class Leaf:
    """The value that is computed if ``tests`` have these outcomes."""

    tests: tuple[tuple[Node, bool], ...]
    node: Node


def branches(form: Form | Node) -> list[Leaf]:
    """Every formula that tests choose between, with the tests' outcomes; one leaf if there are no tests.

    Only tests that affect the result count; a test that another one makes redundant is omitted. With more
    than six tests the whole node is one leaf.
    """
    node = _result(form)
    leaves: list[Leaf] = []
    todo: list[Leaf] = [Leaf((), node)]
    while todo:
        leaf = todo.pop(0)
        first = next((inner for inner in walk(leaf.node) if inner.op == "branch"), None)
        if first is None:
            leaves.append(leaf)
            continue
        if len(leaf.tests) == _MOST_TESTS:
            return [Leaf((), node)]
        test = first.args[0]
        for outcome in (True, False):
            todo.append(Leaf((*leaf.tests, (test, outcome)), decided(leaf.node, test, outcome=outcome)))
    return leaves


def decided(node: Node, test: Node, *, outcome: bool) -> Node:
    """The graph for this outcome of ``test``."""
    side = 1 if outcome else 2
    done: dict[bytes, Node] = {}

    def chosen(current: Node) -> Node | None:
        decides = current.op == "branch" and current.args[0] == test
        return rebuild(current.args[side], chosen, renormalised, done) if decides else None

    return rebuild(node, chosen, renormalised, done)


_NAMED = ("argument", "attribute")


def digest(form: Form | Node) -> str:
    """16 hexadecimal characters, the same for forms that are equal up to names of arguments and attributes.

    Names are removed before operands are sorted, so a new name cannot change the order. Arguments are
    distinguished by their order in the signature, attributes by their first occurrence in the form.
    """
    roots = _roots(form)
    unnamed: dict[bytes, bytes] = {}
    for root in roots:
        _digest_without_names(root, unnamed)
    numbers: dict[bytes, int] = {}
    if isinstance(form, Form):
        keys = (Node("argument", (), name).key for name in form.arguments)
        numbers = {key: number for number, key in enumerate(key for key in keys if key in unnamed)}
    done: dict[bytes, bytes] = {}
    text = b"".join(_numbered(root, unnamed, numbers, done) for root in roots)
    return blake2b(text, digest_size=8).hexdigest()


def _digest_without_names(node: Node, unnamed: dict[bytes, bytes]) -> bytes:
    """The digest of a node without names; ``unnamed`` gets it for every node under it."""
    if node.key not in unnamed:
        parts = [_digest_without_names(argument, unnamed) for argument in node.args]
        unnamed[node.key] = _hashed(node, sorted(parts) if node.op in COMMUTATIVE else parts)
    return unnamed[node.key]


def _numbered(
    node: Node, unnamed: dict[bytes, bytes], numbers: dict[bytes, int], done: dict[bytes, bytes]
) -> bytes:
    """The digest of a node with numbers instead of names; ``numbers`` gets those of new names."""
    result = done.get(node.key)
    if result is None:
        if node.op in _NAMED:
            number = numbers.setdefault(node.key, len(numbers))
            result = f"{node.op} {number}".encode()
        else:
            args = list(node.args)
            if node.op in COMMUTATIVE:
                args.sort(key=lambda argument: unnamed[argument.key])
                if len({unnamed[argument.key] for argument in args}) < len(args):
                    # Equal except for names: operands whose names have numbers come in that order.
                    args.sort(
                        key=lambda argument: sorted(
                            numbers.get(inner.key, len(numbers))
                            for inner in walk(argument)
                            if inner.op in _NAMED
                        )
                    )
            result = _hashed(node, [_numbered(argument, unnamed, numbers, done) for argument in args])
        done[node.key] = result
    return result


def _hashed(node: Node, parts: list[bytes]) -> bytes:
    value = None if node.op in _NAMED else node.value
    return blake2b(f"{node.op} {value!a} {len(parts)} ".encode() + b"|".join(parts), digest_size=16).digest()

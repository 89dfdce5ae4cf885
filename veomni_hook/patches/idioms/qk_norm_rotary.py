"""Attention that normalises queries and keys per head and then rotates them: both in one kernel.

The idioms of `rms_norm` and `rotary` find the norms and the rotary function in the same module. The guard is
inserted before the run of statements from the first norm to the rotation. If a kernel takes the call, the
same statements run without the norms, and the kernel replaces the rotary function.

The run can be written without the norms if nothing else uses or changes the normalised tensors before the
rotation. Heads may be transposed in between: that does not affect a norm over the last dimension.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_names, loaded, local_names
from veomni_hook.patches.code.statement_runs import Run, simple_target
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import blocks, calls_in, chain, initialised, is_plain, swapped, walk_ast
from veomni_hook.patches.graph import Node, constant, digest, variant_names
from veomni_hook.patches.idioms.rms_norm import find as find_rms_norms
from veomni_hook.patches.idioms.rotary import find as find_rotations
from veomni_hook.patches.idioms.shared import has_receiver
from veomni_hook.patches.interpreter.walk import bound
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import Method, ModuleView, called_otherwise
from veomni_hook.patches.site import Code, Missed, Site, Status, skipped_at_calls, slot_name

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "qk_norm_rotary"
WORDS = "apply RMSNorm | apply mean("
CANDIDATES = (
    "every forward that passes two locals to a function whose name matches apply.*(rotary|rope), where both"
    " hold results of norms: attributes that __init__ creates from classes with an rms_norm candidate"
)

HEADS_FIRST = Template("X.transpose(1, 2)")


class _Step(NamedTuple):
    """A statement and its number in the block; with the test if it is inside an ``if`` of the run."""

    number: int
    statement: ast.stmt
    test: ast.expr | None = None


@dataclass(frozen=True)
class _TurnedNorms:
    """A run from the first of two norms to the call that rotates their results.

    Attributes:
        run: the statements.
        norms: the calls of both norms, in the order of the requested names.
        tests: the tests of ``if`` statements in the run; if all hold, the whole run is executed.
        tensor: a local that holds a tensor before the run.
    """

    run: Run
    norms: tuple[ast.Call, ast.Call]
    tests: tuple[ast.expr, ...]
    tensor: str
    _steps: tuple[_Step, ...]

    def without_norms(self, call: ast.Call, by: ast.expr) -> list[ast.stmt]:
        """The statements of the run without the norms, and with ``call`` replaced by ``by``."""
        swaps = {id(call): (by,), **{id(norm): (norm.args[0],) for norm in self.norms}}
        statements = [swapped(step.statement, swaps) for step in self._steps]
        return [
            statement
            for statement in statements
            if getattr(_value_of(statement), "id", "") != simple_target(statement)
        ]

    def tables(self, cos: str, sin: str) -> str:
        """Code for cos and sin that is valid before the run; ``None`` if the run computes them."""
        tables = f"({cos}, {sin})"
        for step in self._steps:
            targets = getattr(step.statement, "targets", ())
            if any(
                isinstance(target, ast.Tuple) and ast.unparse(target) in (tables, tables[1:-1])
                for target in targets
            ):
                value = _value_of(step.statement)
                tables = value.id if isinstance(value, ast.Name) else "None"
        return "None" if bound_names(self.run.statements) & set(loaded([ast.parse(tables)])) else tables


def _around(
    function: FunctionNode, call: ast.Call, names: Sequence[str], is_norm: Callable[[ast.AST], object]
) -> _TurnedNorms:
    """The run that ends with ``call``, whose arguments are ``names``.

    Raises:
        Missed: there is none.
    """
    for block in blocks(function):
        steps = list(_steps(block, call, names))
        last = next((n for n, step in enumerate(steps) if _value_of(step.statement) is call), 0)
        q, k = (_normed(steps[:last], name, is_norm) for name in names)
        if q is not None and k is not None:
            break
    else:
        said = "heads are joined or changed between norms and rotation, or these are in different blocks"
        raise Missed(said, code=Code.NO_ROOM)
    first, norm = min(q, k, key=lambda place: place[0])
    run = Run(function, block, steps[first].number, steps[last].number)
    inside = [step for step in steps if run.first <= step.number <= run.last]
    if any(_does_more(step.statement) for step in inside):
        raise Missed("a statement between norms and rotation does more than assign", code=Code.NO_ROOM)
    later = loaded([*function.body, *(step.statement for step in steps[last + 1 :])], run.statements)
    if set(names) & set(later) - bound_names([steps[last].statement]):
        raise Missed("the normalised tensors are used again after the rotation", code=Code.NO_ROOM)
    tests = tuple(step.test for step in inside if step.test is not None)
    if not all(map(is_plain, tests)) or bound_names(run.statements) & set(loaded(tests)):
        said = "the test around the norms or the rotation cannot be evaluated before them"
        raise Missed(said, code=Code.NO_ROOM)
    if not (tensor := _tensor(function, norm.args[0])):
        raise Missed("no tensor is known", code=Code.NO_ROOM)
    return _TurnedNorms(run, (q[1], k[1]), tests, tensor, tuple(inside))


def _value_of(statement: ast.stmt) -> ast.expr | None:
    """What a statement assigns."""
    return statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None


def _steps(block: Sequence[ast.stmt], call: ast.Call, names: Sequence[str]) -> Iterator[_Step]:
    """The statements of a block; an ``if`` around ``call`` or an assignment to ``names`` is expanded."""
    for number, statement in enumerate(block):
        if isinstance(statement, ast.If) and not statement.orelse:
            if call in walk_ast(statement) or bound_names(statement.body) & set(names):
                yield from (_Step(number, inner, statement.test) for inner in statement.body)
                continue
        yield _Step(number, statement)


def _normed(
    steps: Sequence[_Step], name: str, is_norm: Callable[[ast.AST], object]
) -> tuple[int, ast.Call] | None:
    """The last step that assigns a norm's result to ``name``, if later steps only transpose it."""
    for number in range(len(steps) - 1, -1, -1):
        statement = steps[number].statement
        if name not in {*bound_names([statement]), *loaded([statement])}:
            continue
        inner = _value_of(statement) if simple_target(statement) == name else None
        while inner is not None and (heads_first := HEADS_FIRST.match(inner)) is not None:
            inner = heads_first.expression("X")
        if isinstance(inner, ast.Call) and is_norm(inner):
            return number, inner
        if getattr(inner, "id", "") != name:
            return None
    return None


def _does_more(statement: ast.stmt) -> bool:
    """Whether a statement is neither an assignment nor an expression, or may change a tensor in place."""
    nodes = list(walk_ast(statement))
    called = (node.func for node in nodes if isinstance(node, ast.Call))
    names = (function.attr for function in called if isinstance(function, ast.Attribute))
    plain = isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr)
    stores = any(isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) for node in nodes)
    return stores or not plain or any(name.endswith("_") and not name.endswith("__") for name in names)


def _tensor(function: FunctionNode, node: ast.expr) -> str:
    """The local that an expression derives a tensor from, through method and module calls."""
    if isinstance(node, ast.Call):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        local = _tensor(function, inner) if inner is not None else ""
        return local or (_tensor(function, node.args[0]) if node.args else "")
    if isinstance(node, ast.Subscript):
        return _tensor(function, node.value)
    name = getattr(node, "id", "")
    return name if name in local_names(function) - {function.args.args[0].arg} else ""


NORMED = Template("SELF.NORM(X)")
_ROTARY = re.compile(r"apply\w*(?:rotary|rope)", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"self(\.\w+)")


@cache
def _fused(op: str) -> tuple[str, ...]:
    """The variants of rms_norm or rotary of which this op's variants consist: ``<norm>_<rotation>``."""
    both = [f"_{variant}_" for variant in variant_names(OP)]
    return tuple(name for name in variant_names(op) if any(f"_{name}_" in variant for variant in both))


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for owner, forward in view.forwards():
        text = view.text(forward)
        # In most files, a case-insensitive search takes ten times as long as everything else.
        if "apply" not in text or not _ROTARY.search(text) or not has_receiver(forward):
            continue
        classes = {site.target.partition(".")[0]: site for site in view.sites(find_rms_norms)}
        created = ((name, call.func) for name, value in initialised(owner) for call in calls_in(value))
        norms = {name: classes[chain(kind)] for name, kind in created if chain(kind) in classes}
        site = _Search(view, owner, forward, norms).site() if norms else None
        if site is not None:
            yield site


class _Search(Method):
    """Looks for the run in one forward; ``norms`` are the sites of the attributes' classes."""

    def __init__(
        self, view: ModuleView, owner: ast.ClassDef, method: FunctionNode, norms: Mapping[str, Site]
    ) -> None:
        super().__init__(view, owner, method)
        self.norms = norms

    def site(self) -> Site | None:
        """The forward as a site; None if it is not a candidate."""
        nodes = list(walk_ast(self.method))
        normed = [n for n in nodes if isinstance(n, ast.Assign) and any(map(self.norm, walk_ast(n)))]
        reasons = []
        for call in calls_in(self.method):
            name = getattr(call.func, "id", "")
            values = (*call.args, *(keyword.value for keyword in call.keywords))
            known = {simple_target(assignment) for assignment in normed if assignment.lineno < call.lineno}
            if _ROTARY.search(name) and len({getattr(value, "id", None) for value in values} & known) > 1:
                try:
                    return self.at(call, name)
                except Missed as missed:
                    reasons.append(missed.reason)
        if not reasons:
            return None
        return Site(OP, self.target, Status.MISSED, reason=reasons[0], lineno=self.method.lineno)

    def norm(self, node: ast.AST) -> str:
        """The attribute if a node calls one of the module's norms with one tensor; else empty."""
        match = NORMED.match(node, SELF=self.receiver)
        return match["NORM"] if match is not None and match["NORM"] in self.norms else ""

    def at(self, call: ast.Call, name: str) -> Site:
        """The site of a call of a rotary function; raises `Missed` if there is none."""
        functions = (site for site in self.view.sites(find_rotations) if site.counted)
        turn = next((site for site in functions if site.target == name), None)
        if turn is None or turn.variant not in _fused("rotary"):
            said = f"{name} is not one of {', '.join(_fused('rotary'))}"
            raise Missed(said, code=Code.NO_FUSED_FORM)
        operands = self.operands(call, turn)
        if operands is None or operands["unsqueeze_dim"] != "1":
            said = f"{name} does not get heads before positions, or gets more than plain names"
            raise Missed(said, code=Code.OTHER_ARGUMENTS)
        turned = _around(self.method, call, (operands["q"], operands["k"]), self.norm)
        return self.route(turned, call, operands, turn)

    def operands(self, call: ast.Call, turn: Site) -> dict[str, str] | None:
        """The call's arguments as text, by operand name; None if they are not plain expressions."""
        keywords = {keyword.arg or "": keyword.value for keyword in call.keywords}
        passed = bound(self.view.functions[turn.target], call.args, keywords)
        expressions = {
            name: value for name, value in passed.defaults.items() if value is not None
        } | passed.values
        if "" in keywords or not all(map(is_plain, [*expressions.values(), *passed.others.values()])):
            return None
        said = {name: turn.captures.get(name, name) for name in ("q", "k", "cos", "sin", "unsqueeze_dim")}
        return {
            name: ast.unparse(expressions[text]) if text in expressions else text
            for name, text in said.items()
        }

    def route(self, turned: _TurnedNorms, call: ast.Call, inputs: Mapping[str, str], turn: Site) -> Site:
        """The site of a run; raises `Missed` if there is none."""
        attributes = [self.norm(node) for node in turned.norms]
        norm, other = (self.norms[attribute] for attribute in attributes)
        weight, eps = (_ATTRIBUTE.fullmatch(norm.captures.get(name, "")) for name in ("weight", "eps"))
        if norm is not other or norm.variant not in _fused("rms_norm") or weight is None or eps is None:
            why = self.view.scope.why_refused(norm.target.partition(".")[0])
            known = ", ".join(_fused("rms_norm"))
            said = f"the norms do not share one class that computes one of {known}{why}"
            raise Missed(said, code=Code.NO_FUSED_FORM)
        if reason := called_otherwise(self.view, norm.target.partition(".")[0]):
            raise Missed(reason)
        variant = f"{norm.variant}_{turn.variant}"
        norms = [f"{self.receiver}.{attribute}" for attribute in attributes]
        asked = [self.receiver, turned.tensor, *norms, norm.target.partition(".")[0], turn.target]
        asked.append(turned.tables(inputs["cos"], inputs["sin"]))
        tests = dict.fromkeys(f"({ast.unparse(test)})" for test in turned.tests)
        operands = [inputs["q"], inputs["k"], *(f"{norm}{weight[1]}" for norm in norms)]
        operands += [*(f"{norm}{eps[1]}" for norm in norms), inputs["cos"], inputs["sin"]]
        fused = ast.parse(f"{self.kernel}({', '.join(operands)})", mode="eval").body
        comment = f"{OP}/{variant}: norms of queries and keys, and their rotation"
        answer = turned.without_norms(call, fused)
        slot = slot_name(OP, variant)
        edits = guard(self.view, turned.run, slot, asked, answer, comment, tests=tests, returns=False)
        if edits is None:
            raise Missed("a statement does not begin its own line", code=Code.NO_ROOM)
        return Site.asking(
            OP,
            self.target,
            variant,
            self.method,
            edits,
            form=digest(Node("tuple", (constant(norm.form), constant(turn.form)))),
            captures={"q_norm": norms[0], "k_norm": norms[1], "rotary": turn.target},
            relies_on=(norm.target, *norm.relies_on, turn.target),
            skips={self.target: (*skipped_at_calls(norm), *skipped_at_calls(turn))},
        )

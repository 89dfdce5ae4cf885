"""Attention that normalises queries and keys per head and then rotates them: both in one kernel.

The idioms of `rms_norm` and `rotary` find the norms and the rotary function in the same module. The guard is
inserted before the run of statements from the first norm to the rotation. If a kernel takes the call, the
same statements run without the norms, and the kernel replaces the rotary function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.statement_runs import simple_target
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import calls_in, chain, initialised, is_plain, walk_ast
from veomni_hook.patches.graph import Node, constant, digest, variant_names
from veomni_hook.patches.idioms.qk_norm_rotary.read import TurnedNorms
from veomni_hook.patches.idioms.rms_norm import find as find_rms_norms
from veomni_hook.patches.idioms.rotary import find as find_rotations
from veomni_hook.patches.interpreter.walk import bound
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import Method, ModuleView, called_otherwise
from veomni_hook.patches.site import Code, Reason, Site, Status, formula_slot, skipped_at_calls

__all__ = ["CANDIDATES", "OP", "find"]

OP = "qk_norm_rotary"
CANDIDATES = (
    "every forward that passes two locals to a function whose name matches apply.*(rotary|rope), where both"
    " hold results of norms: attributes that __init__ creates from classes with an rms_norm candidate"
)

NORMED = Template("SELF.NORM(X)")
_ROTARY = re.compile(r"apply\w*(?:rotary|rope)", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"self(\.\w+)")


@cache
def _norms() -> tuple[str, ...]:
    """The variants of rms_norm that this op's variants begin with."""
    starts = variant_names(OP)
    return tuple(
        name for name in variant_names("rms_norm") if any(one.startswith(f"{name}_") for one in starts)
    )


@cache
def _rotations() -> tuple[str, ...]:
    """The variants of rotary that this op's variants end with."""
    ends = variant_names(OP)
    return tuple(name for name in variant_names("rotary") if any(one.endswith(f"_{name}") for one in ends))


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for owner, forward in view.forwards():
        text = view.text(forward)
        # In most files, a case-insensitive search takes ten times as long as everything else.
        if "apply" not in text or not _ROTARY.search(text):
            continue
        classes = {site.target.partition(".")[0]: site for site in view.sites(find_rms_norms)}
        made = ((name, call.func) for name, value in initialised(owner) for call in calls_in(value))
        norms = {name: classes[chain(kind)] for name, kind in made if chain(kind) in classes}
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
            known = {simple_target(each) for each in normed if each.lineno < call.lineno}
            if _ROTARY.search(name) and len({getattr(each, "id", None) for each in values} & known) > 1:
                found = self.at(call, name)
                if isinstance(found, Site):
                    return found
                reasons.append(found)
        if not reasons:
            return None
        return Site(OP, self.target, Status.MISSED, reason=reasons[0], lineno=self.method.lineno)

    def norm(self, node: ast.AST) -> str:
        """The attribute if a node calls one of the module's norms with one tensor; else empty."""
        found = NORMED.match(node, SELF=self.receiver)
        return found["NORM"] if found is not None and found["NORM"] in self.norms else ""

    def at(self, call: ast.Call, name: str) -> Site | str:
        """The site of a call of a rotary function, or why there is none."""
        functions = (site for site in self.view.sites(find_rotations) if site.counted)
        turn = next((site for site in functions if site.target == name), None)
        if turn is None or turn.variant not in _rotations():
            said = f"{name} is not one of {', '.join(_rotations())}"
            return Reason(said, Code.NO_FUSED_FORM)
        given = self.operands(call, turn)
        if given is None or given["unsqueeze_dim"] != "1":
            said = f"{name} does not get heads before positions, or gets more than plain names"
            return Reason(said, Code.OTHER_ARGUMENTS)
        found = TurnedNorms.around(self.method, call, (given["q"], given["k"]), self.norm)
        if isinstance(found, str):
            return Reason(found, Code.NO_ROOM)
        return self.route(found, call, given, turn)

    def operands(self, call: ast.Call, turn: Site) -> dict[str, str] | None:
        """The call's arguments as text, by operand name; None if they are not plain expressions."""
        keywords = {keyword.arg or "": keyword.value for keyword in call.keywords}
        passed = bound(self.view.functions[turn.target], call.args, keywords)
        given = {name: value for name, value in passed.defaults.items() if value is not None} | passed.values
        if "" in keywords or not all(map(is_plain, [*given.values(), *passed.others.values()])):
            return None
        said = {name: turn.captures.get(name, name) for name in ("q", "k", "cos", "sin", "unsqueeze_dim")}
        return {name: ast.unparse(given[text]) if text in given else text for name, text in said.items()}

    def route(self, found: TurnedNorms, call: ast.Call, given: Mapping[str, str], turn: Site) -> Site | str:
        """The site of a run, or why there is none."""
        attributes = [self.norm(node) for node in found.norms]
        norm, other = (self.norms[attribute] for attribute in attributes)
        weight, eps = (_ATTRIBUTE.fullmatch(norm.captures.get(name, "")) for name in ("weight", "eps"))
        if norm is not other or norm.variant not in _norms() or weight is None or eps is None:
            why = self.view.scope.why_refused(norm.target.partition(".")[0])
            said = f"the norms do not share one class that computes one of {', '.join(_norms())}{why}"
            return Reason(said, Code.NO_FUSED_FORM)
        if reason := called_otherwise(self.view, norm.target.partition(".")[0]):
            return reason
        variant = f"{norm.variant}_{turn.variant}"
        slot = formula_slot(OP, variant)
        norms = [f"{self.receiver}.{attribute}" for attribute in attributes]
        asked = [self.receiver, found.tensor, *norms, norm.target.partition(".")[0], turn.target]
        asked.append(found.tables(given["cos"], given["sin"]))
        tests = dict.fromkeys(f"({ast.unparse(test)})" for test in found.tests)
        operands = [given["q"], given["k"], *(f"{each}{weight[1]}" for each in norms)]
        operands += [*(f"{each}{eps[1]}" for each in norms), given["cos"], given["sin"]]
        fused = ast.parse(f"{self.kernel}({', '.join(operands)})", mode="eval").body
        comment = f"{OP}/{variant}: norms of queries and keys, and their rotation"
        answer = found.without_norms(call, fused)
        edits = guard(self.view, found.run, slot.name, asked, answer, comment, tests=tests, returns=False)
        if edits is None:
            return Reason("a statement does not begin its own line", Code.NO_ROOM)
        return Site(
            OP,
            self.target,
            Status.ROUTED,
            variant,
            form=digest(Node("tuple", (constant(norm.form), constant(turn.form)))),
            captures={"q_norm": norms[0], "k_norm": norms[1], "rotary": turn.target},
            edits=edits,
            slots=(slot,),
            relies_on=(norm.target, *norm.relies_on, turn.target),
            skips={self.target: (*skipped_at_calls(norm), *skipped_at_calls(turn))},
            lineno=self.method.lineno,
        )

"""Routers of experts: from the logits to the weights and indices of each token's experts.

The guard is inserted where the logits are known. The projection before it, and casts, scaling and the order
of the results after it, stay upstream's. It computes weights and indices, and the other values that later
code reads. Spellings that are equivalent for ``[tokens, experts]`` get one form, so that each variant has few
patterns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import bound_names, free_name, loaded
from veomni_hook.patches.code.statement_runs import Run, at_hand, simple_target
from veomni_hook.patches.code.tree import called_attributes, swapped, walk_ast
from veomni_hook.patches.graph import (
    ANY,
    FLOAT32,
    FUNCTION,
    NUMBER,
    Difference,
    Form,
    Node,
    Rule,
    constant,
    decided,
    digest,
    dtype_of,
    layouts,
    match,
    rebuild,
    reference_form,
    renormalised,
    variant_names,
    walk,
)
from veomni_hook.patches.idioms.shared import has_receiver
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import Method, ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status, slot_name
from veomni_hook.patterns import pattern_file

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "moe_router"
WORDS = "topk"
CANDIDATES = (
    "Every forward of a class whose name contains Router, Gate or Gating, and every method whose name "
    "contains route, that calls topk, itself or in a method of its class that it calls."
)
_CLASS = re.compile(r"Router|Gate|Gating")
_REFERENCE = pattern_file(OP)
# The position of the dimension in these operations' arguments.
_DIM = {"softmax": 1, "topk": 2, "gather": 1, "sum": 1}
_RESHAPES = ("reshape", "expand", "unsqueeze", "unflatten", "index")
_SAME_RANK = ("linear", "cast", "mul", "div", "softmax", "sigmoid", "tanh")
_PARTS = ("values", "indices")
_LOGITS, _NORMALISE, _EPSILON = (
    Node("argument", (), name) for name in ("router_logits", "normalise", "epsilon")
)


def _is_flag(node: Node) -> bool:
    return node.op in ("attribute", "argument") or (node.op == "constant" and type(node.value) is bool)


def _is_function(node: Node) -> bool:
    # `logits.sigmoid()` names no function, but torch has one.
    return FUNCTION.accepts(node) or (node.op == "global" and str(node.value).startswith("torch."))


def _is_float32(node: Node) -> bool:
    # Under autocast, the product of two tensors in float32 is not: the guard asks for the dtype.
    return all(
        dtype_of(argument) == FLOAT32 for argument in (node.args[:2] if node.op == "linear" else (node,))
    )


_FLAG = Rule("a flag", _is_flag)
_FLOAT32 = Rule("logits in float32", _is_float32)
#: What operands may match, by their names.
_RULES = {
    "router_logits": ANY,
    "bias": ANY,
    "fill": ANY,
    "score": Rule("a function", _is_function),
    "normalise": _FLAG,
    "sorted_": _FLAG,
    **dict.fromkeys(("top_k", "num_experts", "num_group", "topk_group", "epsilon"), NUMBER),
}


@dataclass(frozen=True)
class _Pattern:
    """A variant's formula; ``fixed`` are flags and numbers with a known value in it.

    ``uncast``: it does not cast the logits, so that it is the variant's for logits in float32 alone.
    """

    variant: str
    node: Node
    fixed: tuple[tuple[str, bool | float], ...] = ()
    uncast: bool = False


@dataclass(frozen=True)
class _Routing:
    """A run that computes weights and indices, and the locals that hold them at its end.

    ``pair`` is upstream's formula, ``inlined`` the functions of the file that it calls. ``rest`` is what the
    last statement then does to the weights. ``flat``: the code uses dimension 1, which is the last dimension
    only for ``[tokens, experts]``.
    """

    run: Run
    pattern: _Pattern
    weights: str
    indices: str
    bindings: Mapping[str, Node]
    pair: Node
    inlined: tuple[str, ...]
    rest: ast.stmt | None = None
    flat: bool = False


@cache
def _patterns() -> tuple[_Pattern, ...]:
    """Every variant's formula, plus versions with each value of the flag, and without epsilon or cast.

    The large ones come first, and after those of the table the other combinations of axes.
    """
    found: list[_Pattern] = []
    forms = {name: _form(name) for name in dict.fromkeys((*variant_names(OP), *layouts(OP)))}
    sizes = {name: len([*walk(form.result)]) for name, form in forms.items()}
    for variant in sorted(forms, key=lambda name: (name not in variant_names(OP), -sizes[name])):
        arguments = forms[variant].arguments
        made = [_Pattern(variant, _flat(forms[variant].result))]
        for flag in (True, False) if "normalise" in arguments else ():
            chosen = decided(made[0].node, _NORMALISE, outcome=flag)
            made.append(_Pattern(variant, chosen, (("normalise", flag),)))
        for one in made[:] if "epsilon" in arguments else ():
            node = _without(one.node, "add", _EPSILON)
            made.append(_Pattern(variant, node, (*one.fixed, ("epsilon", 0.0))))
        # Without the division there is no epsilon: the version that says so has all operands.
        for one in made:
            operands = {str(inner.value) for inner in walk(one.node) if inner.op == "argument"}
            found += [one] if {*arguments} <= {*dict(one.fixed), *operands} else []
    uncast = [replace(one, node=_without(one.node, "cast", FLOAT32, _LOGITS), uncast=True) for one in found]
    return (*found, *(one for one in uncast if all(one.node != other.node for other in found)))


def _form(variant: str) -> Form:
    function, layout = ("scored", variant) if variant in layouts(OP) else (variant, "")
    return reference_form(_REFERENCE, function, layout)


def _without(node: Node, op: str, second: Node, first: Node | None = None) -> Node:
    """A formula where an operation with this second argument (and this first one) is its first argument."""

    def left(inner: Node) -> Node | None:
        known = inner.op == op and inner.args[1] == second and first in (None, inner.args[0])
        return inner.args[0] if known else None

    return rebuild(node, left, renormalised)


def _flat(node: Node, *, prove: bool = True) -> Node:
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
            rebuilt = Node(current.op, args, current.value, current.origin)
            done[current.key] = _spelled(rebuilt, prove=prove)
        return done[current.key]

    return visit(node)


def _spelled(node: Node, *, prove: bool) -> Node:
    args = list(node.args)
    place = _DIM.get(node.op)
    if place is not None and args[place] == constant(1):
        # If the tensor has more dimensions, dimension 1 is not the last one.
        if not prove or all(inner.op not in _RESHAPES for inner in walk(args[0])):
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


def _is_matrix(node: Node) -> bool:
    """Whether logits are known to be ``[tokens, experts]``: they come from a reshape to two dimensions."""
    if node.op == "reshape":
        return node.args[1].op == "tuple" and len(node.args[1].args) == 2
    if node.op == "call":
        return len(node.args) == 2 and _is_matrix(node.args[1])
    return node.op in _SAME_RANK and _is_matrix(node.args[0])


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for _, owner, method in view.every_method():
        named = method.name == "forward" and _CLASS.search(owner.name) is not None
        if (named or "route" in method.name) and has_receiver(method):
            helpers = [helper for name, helper in view.helpers(owner, method).items() if "route" not in name]
            if any(re.search(r"\btopk\(", view.text(helper)) for helper in (method, *helpers)):
                yield _Search(view, owner, method).site()


class _Search(Method):
    """Looks for one of the formulas in a method, statement by statement."""

    nearest: Difference | None = None

    def site(self) -> Site:
        """The method as a site."""
        body = self.method.body
        for last in range(len(body) - 1, -1, -1):
            # If the formula is not in all code up to here, it is not in a part of that code.
            known = next(self.at(Run(self.method, body, 0, last), whole=True), None)
            if known is None:
                continue
            matrix = _is_matrix(known.bindings["router_logits"])
            for first in range(_first_part(known), -1, -1):
                for routing in self.at(Run(self.method, body, first, last)):
                    if routing.pattern.uncast > known.pattern.uncast:
                        continue
                    if (edits := self.guarded(routing, matrix=matrix)) is None:
                        continue
                    return Site.asking(
                        OP,
                        self.target,
                        routing.pattern.variant,
                        self.method,
                        edits,
                        form=self.digest() or digest(Node("tuple", tuple(routing.bindings.values()))),
                        captures=self.operands(routing) or {},
                        skips={self.target: routing.inlined} if routing.inlined else {},
                    )
        unknown = Reason("no two locals hold weights and indices of a top k", Code.OTHER_FORM)
        reason = self.nearest.why if self.nearest is not None else unknown
        return Site(OP, self.target, Status.MISSED, reason=reason, lineno=self.method.lineno)

    def at(self, run: Run, *, whole: bool = False) -> Iterator[_Routing]:
        """The formulas that a run computes in two of its locals.

        Args:
            whole: the run begins at the method's first statement, so the choice of its start does not matter.
        """
        nodes = [node for statement in run.statements for node in walk_ast(statement)]
        names = list(dict.fromkeys(name for statement in run.statements for name in _assigned(statement)))
        chooses = any("topk" in called_attributes(statement) for statement in run.statements)
        if any(isinstance(node, ast.Return) for node in nodes) or not chooses:
            return
        form = self.form_of_locals(run, names)
        # A kernel cannot replace code that has side effects or may raise before them.
        if not isinstance(form, Form) or form.result.op != "tuple" or (form.effects and not whole):
            return
        named_nodes = [
            (name, _flat(node, prove=not whole)) for name, node in zip(names, form.result.args, strict=True)
        ]
        calls = {node for _, value in named_nodes for node in walk(value) if node.op == "call"}
        for index_name, indices in named_nodes:
            for weight_name, weights in named_nodes if indices.op == "item" else ():
                for inner in self.made_of(run, weight_name, weights):
                    pair = Node("tuple", (inner, indices))
                    if not whole and not calls <= set(walk(pair)):
                        continue
                    for pattern, bindings in self.matches(pair, whole=whole):
                        rest = _rest(run, weight_name, inner) if inner is not weights else None
                        raw = (form.result.args[names.index(name)] for name in (weight_name, index_name))
                        # Dimension 1 is the last one of a matrix.
                        flat = any(
                            inner.op in _DIM and inner.args[_DIM[inner.op]] == constant(1)
                            for inner in walk(*raw)
                        )
                        known = _Routing(run, pattern, weight_name, index_name, bindings, pair, form.inlined)
                        yield replace(known, rest=rest, flat=flat)

    def matches(self, pair: Node, *, whole: bool) -> Iterator[tuple[_Pattern, Mapping[str, Node]]]:
        """The formulas that match weights and indices; of all code before, the logits' dtype is known."""
        for pattern in _patterns():
            if pair.args[0].op != pattern.node.args[0].op:
                continue
            known = {"router_logits": _FLOAT32} if pattern.uncast and whole else {}
            outcome = match(pattern.node, pair, _RULES | known)
            if not isinstance(outcome, Difference):
                yield pattern, outcome.bindings
            elif (
                pattern.variant in variant_names(OP)
                and not pattern.uncast
                and (self.nearest is None or outcome.depth > self.nearest.depth)
            ):
                self.nearest = outcome

    def made_of(self, run: Run, name: str, node: Node) -> Iterator[Node]:
        """A value, and the parts that the last statement casts or scales if it assigns ``name``."""
        yield node
        inside = set(walk_ast(run.statements[-1])) if simple_target(run.statements[-1]) == name else set()
        yield from (
            inner for inner in walk(*node.args) if inner.origin is not None and inner.origin in inside
        )

    def form_of_locals(self, run: Run, names: Sequence[str]) -> Form | Reason:
        """What a run computes in the locals ``names``, as a tuple."""
        result = ast.Tuple([ast.Name(name, ast.Load()) for name in names], ast.Load())
        last = ast.copy_location(ast.Return(result), run.statements[-1])
        return self.form_of(Run(self.method, [*run.statements, last], 0, len(run.statements)))

    def guarded(self, routing: _Routing, *, matrix: bool) -> tuple[Edit, ...] | None:
        """The guard for a run; None if the code around it does not allow one.

        Args:
            routing: the run, and the formula that it computes.
            matrix: whether logits are known to be ``[tokens, experts]``.
        """
        code = self.operands(routing)
        logits = at_hand(ast.parse(code["router_logits"], mode="eval").body) if code is not None else None
        if code is None or logits is None:
            return None
        asked, arguments = logits, ", ".join(code.values())
        if code["router_logits"] == logits:  # else the guard would compute the logits twice
            name = free_name(self.method, "operands")
            asked, arguments = f"*({name} := ({arguments}))", f"*{name}"
        answer = ast.parse(f"{routing.weights}, {routing.indices} = {self.kernel}({arguments})").body
        if routing.rest is not None:
            others = set(loaded([routing.rest])) - {routing.weights, routing.indices}
            if others & bound_names(routing.run.statements):
                return None
            answer.append(routing.rest)
        slot = slot_name(OP, routing.pattern.variant)
        tests = [f"{logits}.ndim == 2"] if routing.flat and not matrix else []
        if routing.pattern.uncast:
            tests.append(f"{logits}.dtype.itemsize == 4")
        if not self.assigned_once_more(routing):
            return None
        what = f"{OP}/{routing.pattern.variant}: weights and indices of each token's experts"
        return guard(
            self.view, routing.run, slot, [self.receiver, asked], answer, what, tests=tests, beside=True
        )

    def assigned_once_more(self, routing: _Routing) -> bool:
        """Whether the guard may recompute the other values of the run that later code reads.

        No statement of the run may change such a value in place, so that the statements that assign it are
        enough. No later statement may act on the same tensor that the weights come from, as a hook does.
        """
        statements = routing.run.statements
        read = set(loaded(self.method.body, skip=statements))
        names = sorted(read & bound_names(statements) - {routing.weights, routing.indices})
        assigning = [statement for statement in statements if bound_names([statement]) & set(names)]
        if not names:
            return True
        nodes = walk_ast(self.method)
        done = [node for node in nodes if isinstance(node, ast.Expr) and node not in statements]
        if not set(names).isdisjoint(loaded(done)):
            return False
        every = self.form_of_locals(routing.run, names)
        some = self.form_of_locals(Run(self.method, assigning, 0, len(assigning) - 1), names)
        return isinstance(every, Form) and isinstance(some, Form) and every.result == some.result

    def operands(self, routing: _Routing) -> dict[str, str] | None:
        """The kernel's arguments, as code that is valid before the run."""
        bound = bound_names(routing.run.statements)
        fixed = dict(routing.pattern.fixed)
        texts = {}
        for name in _form(routing.pattern.variant).arguments:
            if name in fixed:
                texts[name] = repr(fixed[name])
                continue
            expression = self.expression(routing.bindings[name])
            if expression is None or bound & set(loaded([expression])) - set(
                _before(expression, routing.run)
            ):
                return None
            texts[name] = ast.unparse(expression)
        return texts


def _rest(run: Run, name: str, inner: Node) -> ast.stmt | None:
    """The last statement of a run, with ``inner`` in its value replaced by ``name``."""
    value = getattr(run.statements[-1], "value", None)
    if not isinstance(value, ast.expr) or inner.origin is None:
        return None
    new = swapped(value, {id(inner.origin): (ast.Name(name, ast.Load()),)})
    return ast.Assign([ast.Name(name, ast.Store())], new)


def _first_part(routing: _Routing) -> int:
    """The index of the statement that computes the first part of the formula."""
    inputs = set(walk(*routing.bindings.values()))
    parts = {node.origin for node in walk(routing.pair) if node not in inputs}
    statements = routing.run.statements
    last = len(statements) - 1
    return next((n for n in range(last) if not parts.isdisjoint(walk_ast(statements[n]))), last)


def _assigned(statement: ast.stmt) -> list[str]:
    """The names that a statement assigns unconditionally."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    names = [node.id for target in targets for node in walk_ast(target) if isinstance(node, ast.Name)]
    return [name for name in names if name != "_"]


def _before(expression: ast.expr, run: Run) -> list[str]:
    """The names in an expression of the run that still have their values from before the run."""
    bound: set[str] = set()
    for statement in run.statements:
        if expression in set(walk_ast(statement)):
            return [name for name in loaded([expression]) if name not in bound]
        bound |= bound_names([statement])
    # An expression from elsewhere is an argument of the run, with the value from before it.
    return loaded([expression])

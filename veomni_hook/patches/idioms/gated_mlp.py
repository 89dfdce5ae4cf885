"""Gated MLPs: ``activation(gate) * up`` and its clamped variants, regardless of the code around it.

Only the elementwise part goes to a kernel, so projections may be fused, biased, quantised or wrapped, and
the code that follows (dropout, norm, multipliers) stays upstream's. The kernel checks the activation.

In towers of images and sound, whose intermediate size is not always a multiple of 8 (3,420 in Qwen2.5-VL),
the slot calls the projections to gate and up (`project_together`), so that it can pad them. The sizes of text
models all are multiples, and there the text stays shorter.

    kernel(self.gate_proj(x), self.up_proj(x), self.act_fn)
      -> kernel(*slot.projected(self.gate_proj, self.up_proj, x), self.act_fn)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import parameter_names, read_names
from veomni_hook.patches.code.statement_runs import (
    Run,
    at_hand,
    called,
    kernel_call,
    put_together,
    simple_target,
)
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import blocks, calls_in, initialised, last_name, own_attribute, walk_ast
from veomni_hook.patches.graph import (
    ANY,
    FUNCTION,
    NUMBER,
    Difference,
    Form,
    Node,
    Rule,
    match,
    reference_form,
    source,
    specific_first,
    walk,
)
from veomni_hook.patches.idioms.shared import has_receiver
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import Method, ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status, slot_name
from veomni_hook.patterns import pattern_file

__all__ = [
    "ACTIVATIONS",
    "CANDIDATES",
    "OP",
    "WORDS",
    "find",
    "holds_experts",
    "in_tower",
    "is_activation",
    "project_together",
]

OP = "gated_mlp"
WORDS = ""
CANDIDATES = (
    "Every class, other than experts, that uses gate_proj, up_proj and down_proj, or a fused gate_up "
    "projection, and an activation; or that multiplies an activated projection with a projection."
)

#: Activation functions of MLPs; sigmoid and tanh are missing because they gate attention.
ACTIVATIONS = frozenset(
    "elu gelu hardswish leaky_relu mish quick_gelu relu relu6 selu silu softplus swish".split()
)
_ACTIVATION = re.compile(r"(^|_)act")
_PROJECTION = re.compile(r"Linear|Conv|Dense")
_EXPERTS = re.compile(r"(Experts|NaiveMoe)$")
_RESHAPING = frozenset("chunk clamp float reshape split to type unbind unflatten view".split())


def holds_experts(owner: ast.ClassDef) -> bool:
    """Whether a class holds the weights of several experts, by its name or three-dimensional parameters."""
    calls = (call for _, value in initialised(owner) for call in calls_in(value))
    tensors = (call.args[0] for call in calls if last_name(call.func) == "Parameter" and call.args)
    return _EXPERTS.search(owner.name) is not None or any(
        len(getattr(one, "args", ())) > 2 for one in tensors
    )


def is_activation(callee: ast.expr) -> bool:
    """Whether a callee looks like an activation: ``self.act_fn``, ``F.silu``."""
    name = own_attribute(callee)
    return bool(_ACTIVATION.search(name)) if name else last_name(callee) in ACTIVATIONS


class _Flow:
    """Follows the projections of a class through the locals of a method, statement by statement."""

    def __init__(self, owner: ast.ClassDef) -> None:
        self.projections = {
            name
            for name, value in initialised(owner)
            if any(_PROJECTION.search(last_name(call.func)) for call in calls_in(value))
        }
        self.locals: dict[str, str] = {}

    def products(self, body: list[ast.stmt]) -> Iterator[ast.expr]:
        """The products of an activated projection and a projection, or of two halves of one projection."""
        for statement in body:
            value = getattr(statement, "value", None)
            if isinstance(value, ast.expr):
                for node in walk_ast(value):
                    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                        if {self.kind(node.left), self.kind(node.right)} == {"activated", "projected"}:
                            yield node
                for target in statement.targets if isinstance(statement, ast.Assign) else ():
                    self.locals.update(dict.fromkeys(read_names(target), self.kind(value)))
            for name in ("body", "orelse"):
                yield from self.products(getattr(statement, name, []))

    def kind(self, node: ast.expr) -> str:
        """``projected``, ``activated`` (an activated projection), or an empty string."""
        if isinstance(node, ast.Name):
            return self.locals.get(node.id, "")
        if isinstance(node, ast.Call):
            return self.of_call(node)
        if isinstance(node, ast.BinOp):
            # A scaled or shifted projection is still a projection; a changed activated one is not a gate.
            return "projected" if "projected" in (self.kind(node.left), self.kind(node.right)) else ""
        if isinstance(node, ast.NamedExpr):
            self.locals[node.target.id] = self.kind(node.value)
        if isinstance(node, ast.NamedExpr | ast.Subscript):
            return self.kind(node.value)
        return self.kind(node.body) if isinstance(node, ast.IfExp) else ""

    def of_call(self, node: ast.Call) -> str:
        if own_attribute(node.func) in self.projections:
            return "projected"
        operands = [*node.args, *(keyword.value for keyword in node.keywords)]
        if is_activation(node.func):
            return "activated" if any(map(self.kind, operands)) else ""
        if isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPING:
            return next(filter(None, map(self.kind, [node.func.value, *node.args[:1]])), "")
        return ""


_BOUNDARIES = "cu_seqlens"
BOTH = Template("KERNEL(HOME.GATE(X), OTHER.UP(X), *OPERANDS, **OTHERS)", names="HOME OTHER X")


def in_tower(view: ModuleView, owner: ast.ClassDef) -> bool:
    """Whether ``owner`` is created by a class whose ``forward`` gets the boundaries of segments."""
    return any(
        any(_BOUNDARIES in name for name in parameter_names(forward)) and f"{owner.name}(" in view.text(maker)
        for maker, forward in view.forwards()
        if maker is not owner
    )


def project_together(call: ast.Call, slot: str) -> None:
    """Let ``slot`` call the projections if they are the call's first operands and take the same name.

    Mutates ``call``.
    """
    if (both := BOTH.match(call)) is not None:
        modules = f"{both['HOME']}.{both['GATE']}, {both['OTHER']}.{both['UP']}"
        together = ast.parse(f"{slot}.projected({modules}, {both['X']})", mode="eval").body
        call.args[:2] = [ast.Starred(together, ast.Load())]


_REFERENCE = pattern_file(OP)
_LONGEST = 6
_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}
_OWN = re.compile(r"\bself\.(\w+)")
_ACTIVATES = re.compile(rf"\bself\.\w*act|\b({'|'.join(sorted(ACTIVATIONS))}|sigmoid)\b")


def _is_activation(node: Node) -> bool:
    if node.op == "global":
        return str(node.value).rpartition(".")[2] in ACTIVATIONS
    if node.op == "attribute":
        return is_activation(ast.parse(source(node), mode="eval").body)
    return node.op in ("index", "item") and FUNCTION.accepts(node) and "ACT2" in source(node)


_RULES = {
    "gate": ANY,
    "up": ANY,
    "activation": Rule("an activation", _is_activation),
    "limit": NUMBER,
    "alpha": NUMBER,
}


def _multiplies(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.Mult()) | ast.Call(func=ast.Attribute(attr="mul" | "multiply")):
            return True
    return False


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for owner in view.classes.values():
        text = view.text(owner)
        if _ACTIVATES.search(text) is None or holds_experts(owner):
            continue
        texts = {
            name: view.text(method)
            for name, method in view.methods(owner).items()
            if name != "__init__" and has_receiver(method)
        }
        methods = [
            view.methods(owner)[name]
            for name, code in texts.items()
            if (" * " in code or "mul(" in code) and _ACTIVATES.search(code)
        ]
        products = [product for method in methods for product in _Flow(owner).products(method.body)]
        attributes = set(_OWN.findall(text))
        fused = any("gate_up" in name for name in attributes)
        if products or fused or attributes >= _PROJECTIONS:
            yield from _sites(view, owner, methods, products)


def _sites(
    view: ModuleView, owner: ast.ClassDef, methods: Sequence[FunctionNode], products: Sequence[ast.expr]
) -> Iterator[Site]:
    routed, reasons = [], []
    for method in methods:
        search = _Search(view, owner, method, products)
        site = search.site()
        if site is not None:
            routed.append(site)
        reasons += search.differences
    yield from (replace(site, counted=number == 0) for number, site in enumerate(routed))
    if not routed:
        unknown = Reason("no product of an activation is computed here", Code.OTHER_FORM)
        _, nearest = max(reasons, key=itemgetter(0), default=(0.0, unknown))
        yield Site(
            op=OP,
            target=f"{owner.name}.forward",
            status=Status.MISSED,
            reason=nearest,
            lineno=owner.lineno,
        )


@dataclass(frozen=True)
class _Found:
    """A product, and the statements that compute it."""

    run: Run
    variant: str
    operands: Mapping[str, ast.expr]
    taken: ast.expr
    inlined: tuple[str, ...]


class _Search(Method):
    """Looks for gated products in one method."""

    def __init__(
        self, view: ModuleView, owner: ast.ClassDef, method: FunctionNode, products: Sequence[ast.expr]
    ) -> None:
        super().__init__(view, owner, method)
        self.products = products
        # Each with the fraction of the formula that matched before.
        self.differences: list[tuple[float, Reason]] = []

    def site(self) -> Site | None:
        """The method as a site, if a product in it is routed."""
        places = ((block, index) for block in blocks(self.method) for index in range(len(block)))
        products = [one for place in places if (one := self.at(*place)) is not None]
        routed = [
            (one, guards) for one in products if (guards := self.route(one, returns=one is products[-1]))
        ]
        if not routed:
            return None
        variants = list(dict.fromkeys(one.variant for one, _ in routed))
        inlined = tuple(dict.fromkeys(name for one, _ in routed for name in one.inlined))
        edits = [edit for _, of_product in routed for edit in of_product]
        captures = {name: ast.unparse(operand) for name, operand in routed[0][0].operands.items()}
        skips = {self.target: inlined} if inlined else {}
        return Site.asking(
            OP, self.target, variants, self.method, edits, form=self.digest(), captures=captures, skips=skips
        )

    def at(self, block: list[ast.stmt], index: int) -> _Found | None:
        """The product that a statement computes, alone or together with assignments before it."""
        value = getattr(block[index], "value", None)
        if not isinstance(value, ast.expr) or not any(map(_multiplies, walk_ast(value))):
            return None
        runs = Run(self.method, block, index, index).longer(_LONGEST)
        known = [(run, self.form_of(run)) for run in runs]
        self.differences += [(0.0, form) for _, form in known if isinstance(form, Reason)]
        forms = [(run, form) for run, form in known if isinstance(form, Form)]
        inside = set(walk_ast(value))
        for variant in specific_first(OP):
            pattern = reference_form(_REFERENCE, variant)
            for run, form in forms:
                for node in walk(form.result):
                    operands = self.operands(pattern, node) if node.origin in inside else None
                    if operands is not None and node.origin is not None:
                        return _Found(run, variant, operands, node.origin, form.inlined)
        return None

    def operands(self, pattern: Form, node: Node) -> dict[str, ast.expr] | None:
        """The operands of a formula that matches a node, as upstream's expressions."""
        wanted = not self.products or any(inner.origin in self.products for inner in walk(node))
        if node.op != pattern.result.op or not wanted:
            return None
        outcome = match(pattern.result, node, _RULES)
        if isinstance(outcome, Difference):
            self.differences.append((outcome.depth, outcome.why))
            return None
        bound = {name: self.expression(outcome.bindings[name]) for name in pattern.arguments}
        said = {name: operand for name, operand in bound.items() if operand is not None}
        return said if len(said) == len(bound) else None

    def route(self, product: _Found, *, returns: bool) -> tuple[Edit, ...]:
        """The guard for a product; empty if the code around it does not allow one."""
        result = put_together(product.run.statements, product.taken, product.operands, self.kernel)
        last = product.run.statements[-1]
        name = simple_target(last)
        edits = None
        if result is not None and (name is not None or isinstance(last, ast.Return)):
            store = ast.Return(result) if name is None else ast.Assign([ast.Name(name, ast.Store())], result)
            gate = at_hand(called(result, self.kernel, "gate")) or self.method.args.args[1].arg
            asked = [self.receiver, gate]
            asked += [ast.unparse(product.operands[n]) for n in ("activation",) if n in product.operands]
            slot = slot_name(OP, product.variant)
            if in_tower(self.view, self.owner):
                project_together(kernel_call(result, self.kernel), slot)
            comment = f"{OP}/{product.variant}: the product of activation and projection"
            edits = guard(self.view, product.run, slot, asked, [store], comment, returns=returns)
        if edits is None:
            text = f"{product.variant}: the code around line {product.taken.lineno} cannot be reordered"
            self.differences.append((1.0, Reason(text, Code.NO_ROOM)))
        return edits or ()

"""Gated MLPs: ``activation(gate) * up`` and its clamped relatives, whatever stands around it.

Only the elementwise middle goes to a kernel, so projections may be fused, biased, quantised or wrapped, and
what follows (dropout, norm, multipliers) stays upstream's. Which activation it is, is for the kernel to ask.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from veomni_hook.patches.graph import (
    ANY,
    FUNCTION,
    NUMBER,
    Difference,
    Form,
    Node,
    Rule,
    Unknown,
    canonical,
    digest,
    match,
    reference_form,
    source,
    walk,
)
from veomni_hook.patches.graph.text import can_be_said
from veomni_hook.patches.idioms.projections import ACTIVATIONS, gated_products, holds_experts, is_activation
from veomni_hook.patches.idioms.site import Site, Splice, Status, slot_name
from veomni_hook.patches.idioms.splice import free_name
from veomni_hook.patches.idioms.takeover import guard
from veomni_hook.patches.idioms.view import ModuleView
from veomni_hook.patches.records import SlotSpec
from veomni_hook.patches.structure.runs import Run, at_hand, blocks, called, put_together, target
from veomni_hook.patches.text.document import FunctionNode

__all__ = ["CANDIDATES", "OP", "find"]

OP = "gated_mlp"
CANDIDATES = (
    "Every class, other than experts, that uses gate_proj, up_proj and down_proj, or a fused gate_up "
    "projection, and an activation; or that multiplies an activated projection with a projection."
)

_REFERENCE = "kernels/gated_mlp/reference.py"
# What says most comes first: each of them is a product, too.
_VARIANTS = ("scaled_sigmoid", "clamped", "clamped_after", "product_float32", "product")
_LONGEST = 6
_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}
_NOTHING = ast.Constant(None)
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
    return (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)) or (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("mul", "multiply")
    )


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for owner in view.classes.values():
        text = view.text(owner)
        if _ACTIVATES.search(text) is None or holds_experts(owner):
            continue
        methods = [
            method
            for name, method in view.methods(owner).items()
            if name != "__init__" and _may_be_gated(view.text(method))
        ]
        products = gated_products(owner, methods) if methods else []
        attributes = set(_OWN.findall(text))
        fused = any("gate_up" in name for name in attributes)
        if products or fused or attributes >= _PROJECTIONS:
            yield from _sites(view, owner, methods, products)


def _may_be_gated(text: str) -> bool:
    return (" * " in text or "mul(" in text) and _ACTIVATES.search(text) is not None


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
        nearest = max(reasons, key=lambda difference: difference.depth, default=None)
        yield Site(
            op=OP,
            target=f"{owner.name}.forward",
            status=Status.MISSED,
            reason=nearest.text if nearest is not None else "no product of an activation is computed here",
            lineno=owner.lineno,
        )


@dataclass(frozen=True)
class _Found:
    """A product, and the statements that compute it."""

    run: Run
    variant: str
    operands: Mapping[str, ast.expr]
    taken: ast.expr


class _Search:
    """Looks for gated products in one method."""

    def __init__(
        self, view: ModuleView, owner: ast.ClassDef, method: FunctionNode, products: Sequence[ast.expr]
    ) -> None:
        self.view = view
        self.owner = owner
        self.method = method
        self.products = products
        self.differences: list[Difference] = []
        self.kernel = free_name(method, "kernel")

    def site(self) -> Site | None:
        """The method as a site, if a product in it is routed."""
        found = [
            one
            for block in blocks(self.method)
            for index in range(len(block))
            for one in self.at(block, index)
        ]
        splices: list[Splice] = []
        variants: dict[str, None] = {}
        captures: dict[str, str] = {}
        for one in found:
            made = self.route(one, returns=one is found[-1])
            if made is None:
                text = (
                    f"{one.variant}: the code around line {one.taken.lineno} cannot be put in another order"
                )
                self.differences.append(Difference(text, 1.0, one.taken.lineno))
                continue
            splices += made
            variants[one.variant] = None
            captures = captures or {name: ast.unparse(operand) for name, operand in one.operands.items()}
        if not splices:
            return None
        form = canonical(self.method, self.view.scope, self.owner)
        return Site(
            op=OP,
            target=f"{self.owner.name}.{self.method.name}",
            status=Status.ROUTED,
            variant="|".join(variants),
            form=digest(form) if isinstance(form, Form) else "",
            captures=captures,
            splices=tuple(splices),
            slots=tuple(SlotSpec(slot_name(OP, variant), OP, variant) for variant in variants),
            lineno=self.method.lineno,
        )

    def at(self, block: list[ast.stmt], index: int) -> Iterator[_Found]:
        """The product that a statement computes, alone or together with assignments before it."""
        value = getattr(block[index], "value", None)
        if not isinstance(value, ast.expr) or not any(map(_multiplies, ast.walk(value))):
            return
        runs = list(Run(self.method, block, index, index).longer(_LONGEST))
        forms = [self.form(run) for run in runs]
        inside = set(ast.walk(value))
        for variant in _VARIANTS:
            for run, form in zip(runs, forms, strict=True):
                for node in walk(form.result) if form is not None else ():
                    if node.origin not in inside:
                        continue
                    if (operands := self.operands(reference_form(_REFERENCE, variant), node)) is not None:
                        yield _Found(run, variant, operands, node.origin)
                        return

    def form(self, run: Run) -> Form | None:
        made = run.as_function()
        form = canonical(made, self.view.scope, self.owner, body=made.body)
        if isinstance(form, Unknown):
            self.differences.append(Difference(f"{form.reason} (line {form.lineno})", 0.0, form.lineno))
            return None
        return form

    def operands(self, pattern: Form, node: Node) -> dict[str, ast.expr] | None:
        """The operands of a formula that a node is, as upstream's expressions."""
        wanted = not self.products or any(inner.origin in self.products for inner in walk(node))
        if node.op != pattern.result.op or node.origin is None or not wanted:
            return None
        found = match(pattern.result, node, _RULES)
        if isinstance(found, Difference):
            self.differences.append(found)
            return None
        bound = {name: self.expression(found.bindings[name]) for name in pattern.arguments}
        return (
            {name: operand for name, operand in bound.items() if operand is not None}
            if all(bound.values())
            else None
        )

    def expression(self, node: Node) -> ast.expr | None:
        """Upstream's expression for a node."""
        if node.op == "global" and self.view.scope.dotted(node.origin or _NOTHING) in ("", f":{node.value}"):
            return None
        if can_be_said(node):
            return ast.parse(source(node, self.method.args.args[0].arg), mode="eval").body
        return node.origin

    def route(self, found: _Found, *, returns: bool) -> tuple[Splice, ...] | None:
        """The guard for a product; None if the code around it does not let one stand there."""
        result = put_together(found.run.statements, found.taken, found.operands, self.kernel)
        last = found.run.statements[-1]
        name = target(last)
        if result is None or (name is None and not isinstance(last, ast.Return)):
            return None
        answer = ast.Return(result) if name is None else ast.Assign([ast.Name(name, ast.Store())], result)
        gate = at_hand(called(result, self.kernel, "gate")) or self.method.args.args[1].arg
        asked = [
            gate,
            *(ast.unparse(found.operands[n]) for n in ("activation",) if n in found.operands),
        ]
        slot = slot_name(OP, found.variant)
        owner = self.method.args.args[0].arg
        condition = f"({self.kernel} := {slot}.kernel({', '.join([owner, *asked])})) is not None"
        comment = f"{OP}/{found.variant}: the product of activation and projection"
        return guard(self.view, found.run, condition, [answer], comment, returns=returns)

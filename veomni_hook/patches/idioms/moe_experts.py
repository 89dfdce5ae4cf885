"""Experts: classes that send tokens through stacked weights, told apart by what one expert computes.

`veomni_hook.patches.idioms.experts_loop` reads the loop; what one expert does in it is compared with the
functions ``*_expert`` of the op's reference. Experts without that loop are compared with a reference as a
whole. A kernel is called with operands in the order of the variant's reference.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b

from veomni_hook.patches.graph import (
    ARGUMENT,
    FUNCTION,
    NUMBER,
    TENSOR,
    Difference,
    Form,
    Match,
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
from veomni_hook.patches.graph.nodes import constant, rebuild
from veomni_hook.patches.idioms.experts_loop import (
    EXPERT,
    ROUTING,
    STATES,
    Computation,
    Loop,
    OtherLoop,
    read_loop,
    statements_text,
)
from veomni_hook.patches.idioms.site import Site, Status, slot_name
from veomni_hook.patches.idioms.splice import before_body, decorate, free_name
from veomni_hook.patches.idioms.view import ModuleView
from veomni_hook.patches.records import SlotSpec
from veomni_hook.patches.text.document import FunctionNode

__all__ = ["CANDIDATES", "OP", "find"]

OP = "moe_experts"
CANDIDATES = (
    "a class whose name ends in Experts or NaiveMoe, or that holds a parameter of three dimensions "
    "of which the first is named after experts"
)

_PARAMETER = re.compile(r"(torch\.)?nn\.Parameter\(torch\.\w+\(.+\)\)", re.DOTALL)
_STACKED = 3
_LINE = 80
_NUMBERED = re.compile(r"for (\w+) in range\([\w.]+\):\n    self\[f'\w*\{\1\}'\]")
_REFERENCE = "kernels/moe_experts/reference.py"
#: Variants of one formula for every expert, with what their results are added up in.
_UNIFORM = {
    "gated": "hidden",
    "gated_clamped": "hidden",
    "gated_clamped_after": "hidden",
    "gated_float32_product": "hidden",
    "gated_jointly": "float32",
    "gated_normalised": "hidden",
    "gated_transposed": "hidden",
    "alpha_gated": "hidden",
    "biased_interleaved_alpha_gated": "hidden",
    "biased_alpha_gated_float32": "float32",
    "ungated": "weights",
}
_RULES: Mapping[str, Rule] = {
    "act_fn": FUNCTION,
    "norm": FUNCTION,
    "module": ARGUMENT,
    "alpha": NUMBER,
    "limit": NUMBER,
}
#: Variants that are recognised as a whole.
_WHOLE = ("batched_gated", "shared_gated")
_WHOLE_RULES = {**_RULES, "hidden_size": NUMBER, "num_experts": NUMBER}
_GROUPED = re.compile(
    r"(?P<rows>\w+) = (?P<inputs>\w+)\.split\((?P<expert_size>\w+), dim=0\)\n"
    r"(?P<parts>\w+) = \[\]\n"
    r"for (?P<number>\w+) in range\((?P<count>[\w.]+)\):\n"
    r"    (?P=parts)\.append\(torch\.nn\.functional\.linear"
    r"\((?P=rows)\[(?P=number)\], self\.(?P<weight>\w+)\[(?P=number)\]\)\)\n"
    r"(?P<result>\w+) = torch\.cat\((?P=parts), dim=0\)\n"
    r"return (?P=result)"
)


class _Miss(Exception):
    """No variant computes the same; the message says what is the nearest and where it differs."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A recognised formula: ``operands`` is what a kernel is called with, as source text."""

    variant: str
    operands: Mapping[str, str]
    form: str
    relies_on: tuple[str, ...] = ()


def find(view: ModuleView) -> Iterator[Site]:
    """Every experts class of a module."""
    for owner in view.classes.values():
        named = owner.name.endswith(("Experts", "NaiveMoe"))
        if not named and ("Parameter(" not in (text := view.text(owner)) or "expert" not in text):
            continue
        shapes = _parameters(owner)
        if not named and not any(
            len(shape) == _STACKED and "expert" in shape[0] for shape in shapes.values()
        ):
            continue
        forward = view.methods(owner).get("forward")
        target = f"{owner.name}.forward" if forward is not None else owner.name
        try:
            if forward is None:
                raise _Miss("it has no forward of its own")
            found = _recognised(view, owner, forward, shapes)
        except _Miss as miss:
            yield Site(OP, target, Status.MISSED, reason=str(miss), lineno=owner.lineno)
        else:
            yield _routed(view, owner, forward, found)


def _parameters(owner: ast.ClassDef) -> dict[str, list[str]]:
    """The parameters that ``__init__`` makes, with their dimensions as source text.

    What ``__init__`` keeps as an attribute has the attribute's name: ``self.num_experts``.
    """
    shapes: dict[str, list[str]] = {}
    kept: dict[str, str] = {}
    for node in _init(owner):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if not isinstance(node, ast.Assign) or not isinstance(target, ast.Attribute):
            continue
        made = _PARAMETER.fullmatch(ast.unparse(node.value))
        if made is None:
            kept[ast.unparse(node.value)] = ast.unparse(target)
        elif isinstance(made_of := node.value.args[0], ast.Call):  # type: ignore[attr-defined]
            sizes = made_of.args
            if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
                sizes = sizes[0].elts
            shapes[target.attr] = [ast.unparse(size) for size in sizes]
    return {name: [kept.get(size, size) for size in shape] for name, shape in shapes.items()}


def _init(owner: ast.ClassDef) -> Iterator[ast.AST]:
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            yield from ast.walk(method)


def _recognised(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, shapes: Mapping[str, list[str]]
) -> _Found:
    try:
        loop = read_loop(forward, view.scope)
    except OtherLoop as other:
        return _as_a_whole(view, owner, forward, shapes, str(other))
    forms = [_form(view, owner, computation) for computation in loop.computations]
    relied = (f"{owner.name}.__init__", *(name for form in forms for name in form.inlined))
    if len(forms) == 2:
        found = _or_identity(view, owner, shapes, loop, forms)
    elif not loop.count:
        found = _by_mask(view, owner, loop, forms[0])
    else:
        found = _uniform(loop, forms[0])
        _check_count(loop, shapes)
    routing = {"hidden_states": loop.hidden, "top_k_index": loop.index, "top_k_weights": loop.weights}
    return _Found(found.variant, {**routing, **found.operands}, found.form, relied)


def _hashed(loop: Loop, forms: Sequence[Form]) -> str:
    text = " ".join([loop.dtype, *map(digest, forms)])
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _form(view: ModuleView, owner: ast.ClassDef, computation: Computation) -> Form:
    function = computation.function
    form = canonical(function, view.scope, owner, body=function.body)
    if isinstance(form, Unknown):
        raise _Miss(f"what an expert computes: {form.reason} (line {form.lineno})")
    return replace(form, result=_with_floats(form.result))


@cache
def _pattern(function: str) -> Form:
    form = reference_form(_REFERENCE, function)
    return replace(form, result=_with_floats(form.result))


def _with_floats(node: Node) -> Node:
    """The graph with 1.0 for 1: all that an expert computes is computed from floating-point rows."""

    def as_float(inner: Node) -> Node | None:
        return constant(float(inner.value), inner.origin) if type(inner.value) is int else None

    return rebuild(node, as_float, lambda changed: changed)


def _uniform(loop: Loop, form: Form) -> _Found:
    stacked = loop.computations[0].stacked
    differences: list[tuple[int, float, str]] = []
    for variant, dtype in _UNIFORM.items():
        bound = _bound(f"{variant}_expert", form, stacked)
        if not isinstance(bound, Difference):
            if dtype != loop.dtype:
                raise _Miss(f"nearest {variant}: results are added up in {loop.dtype}, not {dtype}")
            return _Found(variant, bound, _hashed(loop, [form]))
        other = abs(_size(_pattern(f"{variant}_expert")) - _size(form))
        differences.append((-other, bound.depth, f"nearest {variant}: {bound.text}"))
    text = max(differences)[-1]
    for name, held in {STATES: "rows", ROUTING: "weights", **stacked}.items():
        text = text.replace(name, held)
    raise _Miss(text)


def _size(form: Form) -> int:
    return sum(1 for _ in walk(form.result))


def _or_identity(
    view: ModuleView, owner: ast.ClassDef, shapes: Mapping[str, list[str]], loop: Loop, forms: Sequence[Form]
) -> _Found:
    """Real experts below a number, and some past it that return what they get."""
    identity, real = loop.computations
    gated = _bound("gated_expert", forms[1], real.stacked)
    same = _bound("identity_expert", forms[0], identity.stacked)
    module = "None"
    if isinstance(same, Difference):
        same = _bound("module_expert", forms[0], identity.stacked, {**_RULES, "module": FUNCTION})
        module = same["module"] if isinstance(same, dict) else module
        if isinstance(same, dict) and not _is_identity(view, owner, module):
            raise _Miss(f"nearest gated_or_identity: {module} is no Identity")
    if isinstance(gated, Difference) or isinstance(same, Difference):
        text = gated.text if isinstance(gated, Difference) else same.text  # type: ignore[union-attr]
        raise _Miss(f"nearest gated_or_identity: {text}")
    start, end = f"{EXPERT} >= ", f" or {gated['gate_up_proj']} is None"
    if not identity.test.startswith(start) or not identity.test.endswith(end) or loop.dtype != "hidden":
        raise _Miss(f"nearest gated_or_identity: chosen by {identity.test}")
    number = identity.test.removeprefix(start).removesuffix(end)
    counts = [
        shapes.get(gated[name].removeprefix("self."), [""])[0] for name in ("gate_up_proj", "down_proj")
    ]
    if counts != [loop.count, number]:
        raise _Miss(f"nearest gated_or_identity: stacked over {' and '.join(counts)}")
    operands = {**gated, "num_experts": number, "identity": module}
    return _Found("gated_or_identity", operands, _hashed(loop, forms))


def _is_identity(view: ModuleView, owner: ast.ClassDef, attribute: str) -> bool:
    made = [
        view.scope.dotted(node.value.func)
        for node in _init(owner)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.targets[0]) == attribute
    ]
    return made == ["torch.nn.Identity"]


def _by_mask(view: ModuleView, owner: ast.ClassDef, loop: Loop, form: Form) -> _Found:
    """Experts that are modules of a dictionary, chosen by a mask."""
    bound = _bound("module_expert", form, loop.computations[0].stacked)
    if isinstance(bound, Difference):
        raise _Miss(f"nearest modules: {bound.text}")
    if not _is_numbered(view, owner) or loop.dtype != "hidden":
        raise _Miss("nearest modules: they are not a dictionary's only values, in order")
    return _Found("modules", {"experts": "self.values()"}, _hashed(loop, [form]))


def _is_numbered(view: ModuleView, owner: ast.ClassDef) -> bool:
    """Whether ``__init__`` fills a dictionary with numbered modules, in order, and with nothing else."""
    loops = [node for node in _init(owner) if isinstance(node, ast.For)]
    stored = [
        node for node in _init(owner) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    ]
    others = [
        node
        for node in _init(owner)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.targets != stored
    ]
    return (
        [view.scope.dotted(base) for base in owner.bases] == ["torch.nn.ModuleDict"]
        and len(loops) == len(stored) == 1
        and not others
        and _NUMBERED.match(ast.unparse(loops[0])) is not None
    )


def _as_a_whole(
    view: ModuleView,
    owner: ast.ClassDef,
    forward: FunctionNode,
    shapes: Mapping[str, list[str]],
    other: str,
) -> _Found:
    """Experts without the loop."""
    grouped = _GROUPED.fullmatch(statements_text(forward, view.scope))
    if grouped is not None:
        weight = grouped["weight"]
        if shapes.get(weight, [""])[0] != grouped["count"]:
            raise _Miss(f"nearest grouped_linear: {weight} is not stacked over {grouped['count']}")
        operands = {
            "inputs": grouped["inputs"],
            "expert_size": grouped["expert_size"],
            "weight": f"self.{weight}",
        }
        return _Found("grouped_linear", operands, digest(_pattern("grouped_linear")))
    if any(isinstance(node, ast.For | ast.While) for node in ast.walk(forward)):
        raise _Miss(f"nearest gated: {other}")
    form = canonical(forward, view.scope, owner)
    if isinstance(form, Unknown):
        raise _Miss(f"{other}; {form.reason} (line {form.lineno})")
    differences = [(0.0, other)]
    for variant in _WHOLE:
        formula = reference_form(_REFERENCE, variant)
        made = match(formula, form, {name: _WHOLE_RULES.get(name, TENSOR) for name in formula.arguments})
        if isinstance(made, Match):
            operands = {name: source(made.bindings[name], form.receiver) for name in formula.arguments}
            return _Found(variant, operands, digest(form), form.inlined)
        differences.append((made.depth, f"nearest {variant}: {made.text}"))
    raise _Miss(max(differences)[1])


def _bound(
    pattern: str, form: Form, stacked: Mapping[str, str], rules: Mapping[str, Rule] = _RULES
) -> dict[str, str] | Difference:
    """What the operands of one expert's formula are for all experts, as source text."""
    formula = _pattern(pattern)
    made = match(formula, form, {name: rules.get(name, ARGUMENT) for name in formula.arguments})
    if isinstance(made, Difference):
        return made
    operands = {name: source(made.bindings[name], "self") for name in formula.arguments}
    if (operands.pop("states"), operands.pop("routing")) != (STATES, ROUTING):
        return Difference("expected the rows and their weights in other places", 0)
    return {name: stacked.get(text, text) for name, text in operands.items()}


def _check_count(loop: Loop, shapes: Mapping[str, list[str]]) -> None:
    """What is stacked has to hold as many experts as the mask has rows, the sentinel's aside."""
    for held in loop.computations[0].stacked.values():
        count = shapes.get(held.removeprefix("self."), ["something unknown"])[0]
        if loop.count.removesuffix(" + 1") != count:
            raise _Miss(f"{held} is stacked over {count}, the mask over {loop.count}")


def _routed(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, found: _Found) -> Site:
    slot = slot_name(OP, found.variant)
    kernel, operands = free_name(forward, "kernel"), free_name(forward, "operands")
    values = list(found.operands.values())
    tuple_of = f"({', '.join(values)})"
    if len(tuple_of) > _LINE:
        tuple_of = "(\n" + "".join(f"    {value},\n" for value in values) + ")"
    code = (
        f"{operands} = {tuple_of}\n"
        f"if ({kernel} := {slot}.kernel(self, *{operands})) is not None:\n"
        f"    return {kernel}(*{operands})"
    )
    splices = before_body(view, forward, code, f"{OP}/{found.variant}")
    if owner.decorator_list:
        comment = f"{OP}/{found.variant}: calls that a kernel takes reach the guard in forward"
        splices = (*decorate(view, owner, f"{slot}.reached", comment), *splices)
    return Site(
        OP,
        f"{owner.name}.forward",
        Status.ROUTED,
        variant=found.variant,
        form=found.form,
        captures=dict(found.operands),
        splices=splices,
        slots=(SlotSpec(slot, OP, found.variant),),
        relies_on=found.relies_on,
        lineno=forward.lineno,
    )

"""Experts: classes that send tokens through stacked weights, distinguished by what one expert computes.

`idioms.moe_experts.read` reads the loop; the computation of one expert is compared with ``expert`` of the
op's reference, for one layout after the other, and what ``__init__`` creates with what the formula needs.
Experts without such a loop are compared as a whole. The guard calls a kernel with operands in the order of
the variant's reference.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b

from veomni_hook.patches.code.document import FunctionNode, has_docstring
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import initialised, statements_of_init
from veomni_hook.patches.graph import (
    FUNCTION,
    NUMBER,
    TENSOR,
    Difference,
    Form,
    Match,
    Node,
    Rule,
    canonical,
    constant,
    digest,
    layouts,
    match,
    rebuild,
    recognised,
    reference_form,
    source,
    variant_names,
    walk,
)
from veomni_hook.patches.idioms.moe_experts.read import EXPERT, ROUTING, STATES, Loop
from veomni_hook.patches.routes.guards import as_lambda, ask, before_body, decorate
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status, slot_name
from veomni_hook.patterns import pattern_file

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "moe_experts"
WORDS = "Experts | NaiveMoe | expert Parameter("
CANDIDATES = (
    "a class whose name ends in Experts or NaiveMoe, or that holds a parameter of three dimensions "
    "of which the first is named after experts"
)

_STACKED = 3
_unlike = partial(Missed, code=Code.OTHER_FORM)
_REFERENCE = pattern_file(OP)
_RULES: Mapping[str, Rule] = {"act_fn": FUNCTION, "norm": FUNCTION, "alpha": NUMBER, "limit": NUMBER}
#: Variants that are recognised as a whole.
_WHOLE = ("batched_gated", "shared_gated")
_WHOLE_RULES: Mapping[str, Rule] = {**_RULES, "hidden_size": NUMBER, "num_experts": NUMBER}
#: ``expert >= least or weight is None``: where an expert is no real one.
_EXPERT, _LEAST, _WEIGHT = (Node("argument", (), name) for name in ("expert", "least", "weight"))
_CHOICE = Node("or", (Node("le", (_LEAST, _EXPERT)), Node("is", (_WEIGHT, constant(None)))))
#: What ``__init__`` creates: parameters, and modules under names that end with their number.
PARAMETERS = [Template(f"{home}nn.Parameter(torch.MADE(*SIZES, **OPTIONS))") for home in ("", "torch.")]
NUMBERED = Template("for I in range(COUNT):\n    self[KEY] = MODULE\n    ...")
#: Lists of rows and results, which the graph does not follow.
GROUPED = Template(
    """
ROWS = INPUTS.split(EXPERT_SIZE, dim=0)
PARTS = []
for NUMBER in range(COUNT):
    PARTS.append(torch.nn.functional.linear(ROWS[NUMBER], self.WEIGHT[NUMBER]))
RESULT = torch.cat(PARTS, dim=0)
return RESULT
""",
    names="INPUTS EXPERT_SIZE",
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every experts class of a module."""
    for owner in view.classes.values():
        named = owner.name.endswith(("Experts", "NaiveMoe"))
        if not named and ("Parameter(" not in (text := view.text(owner)) or "expert" not in text):
            continue
        shapes = _parameter_shapes(owner)
        if not named and not any(
            len(shape) == _STACKED and "expert" in shape[0] for shape in shapes.values()
        ):
            continue
        forward = view.methods(owner).get("forward")
        target = f"{owner.name}.forward" if forward is not None else owner.name
        try:
            if forward is None:
                raise _unlike("it defines no forward")
            site = _recognised(view, owner, forward, shapes)
        except Missed as miss:
            yield Site(OP, target, Status.MISSED, reason=miss.reason, lineno=owner.lineno)
        else:
            yield replace(site, edits=_edits(view, owner, forward, site))


def _recognised(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, shapes: Mapping[str, list[str]]
) -> Site:
    """The site of a class, without edits; its captures are the kernel's arguments.

    Raises:
        Missed: it has none of the formulas.
    """
    target = f"{owner.name}.forward"
    grouped = GROUPED.find([forward.body], view.scope.dotted)
    if isinstance(grouped, Found) and grouped.index == has_docstring(forward):
        operands, known = _grouped(grouped, shapes), reference_form(_REFERENCE, "grouped_linear")
        return Site.asking(OP, target, "grouped_linear", forward, (), form=digest(known), captures=operands)
    form = canonical(forward, view.scope, owner)
    if not isinstance(form, Form):
        raise Missed(f"it is not followed: {form}")
    if form.receiver != "self":
        raise _unlike("its first parameter is not self")
    skips = {target: form.inlined} if form.inlined else {}
    asking = partial(Site.asking, OP, target, line=forward, edits=(), skips=skips)
    if all(node.op != "loop" for node in walk(form.result)):
        variant, operands = _as_a_whole(form)
        return asking(variant, form=digest(form), captures=operands, relies_on=form.inlined)
    try:
        loop = Loop(form)
    except Missed as other:
        raise _unlike(f"nearest is gated: {other}") from None
    ways = [_with_floats(way.node) for way in loop.ways]
    if len(ways) == 2:
        variant, operands = _or_identity(view, owner, shapes, loop)
    elif len(ways) > 2:
        raise _unlike("nearest is gated_or_identity: it has more than two branches")
    elif loop.count is None:
        variant, operands = _by_mask(view, owner, loop)
    else:
        variant, operands = _uniform(loop, shapes)
    nodes = {"hidden_states": loop.hidden, "top_k_index": loop.index, "top_k_weights": loop.weights}
    routing = {name: str(node.value) for name, node in nodes.items()}
    text = " ".join([loop.dtype, *map(digest, ways)])
    hashed = blake2b(text.encode(), digest_size=8).hexdigest()
    relied = (f"{owner.name}.__init__", *form.inlined)
    return asking(variant, form=hashed, captures=routing | operands, relies_on=relied)


def _uniform(loop: Loop, shapes: Mapping[str, list[str]]) -> tuple[str, dict[str, str]]:
    """One formula for every expert."""
    differences: list[tuple[int, float, str]] = []
    size = len([*walk(loop.ways[0].node)])
    for variant, layout in layouts(OP).items():
        bound = _bound("expert", loop, 0, layout=variant)
        if isinstance(bound, Difference):
            if variant in variant_names(OP):
                other = abs(len([*walk(_pattern("expert", variant).result)]) - size)
                differences.append((-other, bound.depth, f"nearest is {variant}: {bound.text}"))
            continue
        if loop.dtype != (summed_in := layout.get("summed_in", "hidden")):
            raise _unlike(f"nearest is {variant}: results are summed in {loop.dtype}, not {summed_in}")
        for tensor in loop.stacked.values():
            # The mask needs one row for every expert, besides the sentinel's row.
            count = shapes.get(str(tensor.value), ["something unknown"])[0]
            if count not in loop.counts():
                raise _unlike(f"nearest is {variant}: self.{tensor.value} is stacked over {count}")
        return variant, bound
    raise _unlike(max(differences)[-1])


def _or_identity(
    view: ModuleView, owner: ast.ClassDef, shapes: Mapping[str, list[str]], loop: Loop
) -> tuple[str, dict[str, str]]:
    """Real experts below a number, and identity experts from this number on."""
    gated, same = _bound("expert", loop, 1, layout="gated"), _bound("identity_expert", loop, 0)
    module = "None"
    if isinstance(same, Difference):
        same = _bound("module_expert", loop, 0, {"module": FUNCTION})
        module = same["module"] if isinstance(same, dict) else module
    if isinstance(gated, Difference) or isinstance(same, Difference):
        text = gated.text if isinstance(gated, Difference) else same.text  # type: ignore[union-attr]
        raise _unlike(f"nearest is gated_or_identity: {text}")
    if module != "None" and not _is_identity(view, owner, module):
        raise _unlike(f"nearest is gated_or_identity: {module} is not an Identity")
    test = loop.ways[0].tests[0][0]
    choice = match(_CHOICE, test, {"expert": Rule("its number", EXPERT.__eq__)})
    number = ""
    if isinstance(choice, Match) and source(choice.bindings["weight"]) == gated["gate_up_proj"]:
        number = source(choice.bindings["least"])
    counts = [
        shapes.get(gated[name].removeprefix("self."), [""])[0] for name in ("gate_up_proj", "down_proj")
    ]
    if counts[0] not in loop.counts() or counts[1] != number or loop.dtype != "hidden":
        raise _unlike(f"nearest is gated_or_identity: another choice of experts (line {test.lineno})")
    return "gated_or_identity", {**gated, "num_experts": number, "identity": module}


def _by_mask(view: ModuleView, owner: ast.ClassDef, loop: Loop) -> tuple[str, dict[str, str]]:
    """Experts that are modules in a dictionary, selected by a mask."""
    bound = _bound("module_expert", loop, 0)
    if isinstance(bound, Difference):
        raise _unlike(f"nearest is modules: {bound.text}")
    if not _is_numbered(view, owner) or loop.dtype != "hidden":
        raise _unlike("nearest is modules: they are not a dictionary's only values, in order")
    return "modules", {"experts": "self.values()"}


def _as_a_whole(form: Form) -> tuple[str, dict[str, str]]:
    """Experts without a loop."""
    outcome = recognised(_REFERENCE, form, _WHOLE_RULES, names=_WHOLE, otherwise=TENSOR)
    if isinstance(outcome, Difference):
        raise _unlike(outcome.text)
    variant, bound = outcome
    arguments = reference_form(_REFERENCE, variant).arguments
    return variant, {name: source(bound.bindings[name], form.receiver) for name in arguments}


def _grouped(grouped: Found, shapes: Mapping[str, list[str]]) -> dict[str, str]:
    weight, count = grouped["WEIGHT"], grouped["COUNT"]
    if shapes.get(weight, [""])[0] != count:
        raise _unlike(f"nearest is grouped_linear: self.{weight} is not stacked over {count}")
    return {
        "inputs": grouped["INPUTS"],
        "expert_size": grouped["EXPERT_SIZE"],
        "weight": f"self.{weight}",
    }


def _bound(
    pattern: str, loop: Loop, way: int, more: Mapping[str, Rule] | None = None, layout: str = ""
) -> dict[str, str] | Difference:
    """The operands of one expert's formula, as source text for all experts; else the difference."""
    share = Rule("an expert's share", lambda node: node.op == "argument" and node.value in loop.stacked)
    rules = {"states": Rule("the rows", STATES.__eq__), "routing": Rule("their weights", ROUTING.__eq__)}
    formula = _pattern(pattern, layout)
    rules |= {name: _RULES.get(name, share) for name in formula.arguments[2:]} | dict(more or {})
    outcome = match(formula.result, _with_floats(loop.ways[way].node), rules)
    if isinstance(outcome, Difference):
        return outcome
    operands = {name: outcome.bindings[name] for name in formula.arguments[2:]}
    return {name: source(loop.stacked.get(str(node.value), node)) for name, node in operands.items()}


@cache
def _pattern(function: str, layout: str) -> Form:
    form = reference_form(_REFERENCE, function, layout)
    return replace(form, result=_with_floats(form.result))


def _with_floats(node: Node) -> Node:
    """The graph with floats for integer literals: experts compute everything from floating-point rows."""

    def as_float(inner: Node) -> Node | None:
        return constant(float(inner.value), inner.origin) if type(inner.value) is int else None

    return rebuild(node, as_float, lambda changed: changed)


def _edits(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, site: Site) -> tuple[Edit, ...]:
    slot, operands = slot_name(OP, site.variant), list(site.captures.values())
    said = f"{OP}/{site.variant}"
    edits = before_body(view, forward, ask(forward, slot, "self", operands), said)
    if owner.decorator_list:
        comment = f"{said}: calls that a kernel takes reach the guard in forward"
        taking = as_lambda(forward, operands)
        edits = (*decorate(view, owner, f"{slot}.reached({taking})", comment), *edits)
    return edits


def _parameter_shapes(owner: ast.ClassDef) -> dict[str, list[str]]:
    """The parameters that ``__init__`` creates, with their dimensions as source text.

    A dimension that ``__init__`` also stores has the attribute's name: ``self.num_experts``.
    """
    shapes: dict[str, list[str]] = {}
    kept: dict[str, str] = {}
    for name, value in initialised(owner):
        created = next(filter(None, (form.match(value) for form in PARAMETERS)), None)
        if created is None:
            kept[ast.unparse(value)] = f"self.{name}"
            continue
        sizes = created.bound["SIZES"].nodes
        if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
            sizes = tuple(sizes[0].elts)
        if sizes:
            shapes[name] = [ast.unparse(size) for size in sizes]
    return {name: [kept.get(size, size) for size in shape] for name, shape in shapes.items()}


def _is_numbered(view: ModuleView, owner: ast.ClassDef) -> bool:
    """Whether ``__init__`` fills a ``ModuleDict`` only with numbered modules, in order."""
    if [view.scope.dotted(base) for base in owner.bases] != ["torch.nn.ModuleDict"]:
        return False
    nodes = list(statements_of_init(owner))
    loops = [node for node in nodes if isinstance(node, ast.For)]
    stored = [node for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    assigned = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)]
    others = [node for node in assigned if node.targets != stored]
    counted = NUMBERED.match(loops[0]) if len(loops) == len(stored) == 1 and not others else None
    if counted is None:
        return False
    match counted.expression("KEY"):  # a name that ends with the number: f"expert_{i}"
        case ast.JoinedStr(values=[*words, ast.FormattedValue(value=ast.Name(number))]):
            return number == counted["I"] and all(isinstance(word, ast.Constant) for word in words)
    return False


def _is_identity(view: ModuleView, owner: ast.ClassDef, attribute: str) -> bool:
    """Whether ``__init__`` sets ``self.x``, and only to an ``nn.Identity``."""
    classes = [
        view.scope.dotted(value.func)
        for name, value in initialised(owner)
        if isinstance(value, ast.Call) and f"self.{name}" == attribute
    ]
    return classes == ["torch.nn.Identity"]

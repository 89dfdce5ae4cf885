"""Sequence classifiers: all positions are scored, but only one position's score per row is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import bound_names, free_name, parameter_names, read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    binding,
    bound_once,
    called_attributes,
    chain,
    is_plain,
    own_attribute,
    substituted,
    walk_ast,
)
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "WORDS", "find", "pooling_in"]

OP = "linear_cross_entropy"
VARIANT = "last_token"
WORDS = "logits"
CANDIDATES = (
    "Every forward whose output's logits are selected from, or a mean of, what one of its modules makes: it "
    "scores all positions of a sequence and classifies by one of them."
)
PART = "sequence_classification"  # of the op's candidates
OUTPUT = Template("return OUTPUT(*ARGUMENTS, logits=POOLED, **OTHERS)", names="POOLED")
FULL = Template("return OUTPUT(*ARGUMENTS, loss=LOSS, logits=POOLED, **OTHERS)")
SELECTED = Template("SCORES[ROWS, POSITIONS]", names="SCORES")
#: One position of every row.
POOLED = Template("SCORES[HOME.arange(*ROWS, **OPTIONS), POSITIONS]", names="SCORES")
SCORED = Template("MODULE(STATES)")
#: Uses of all scores that need no scores: their device, the number of rows, an argument of transformers' loss
#: of classes. The kernel checks whether the loss is the one that uses pooled scores only.
HARMLESS = (
    Template("SCORES.device", names="SCORES"),
    Template("SCORES.shape[0]", names="SCORES"),
    Template(
        "self.loss_function(*ARGUMENTS, logits=SCORES, pooled_logits=POOLED, **OPTIONS)", names="SCORES"
    ),
)
_IMPORT = ("veomni_hook.kernels.linear_cross_entropy", "classes as veomni_classes")


def find(view: ModuleView) -> Iterator[Site]:
    """Every forward that pools scores of positions."""
    for owner, forward in view.forwards():
        pooling = pooling_in(forward) if "logits" in view.text(forward) else None
        if pooling is None:
            continue
        target = f"{owner.name}.forward"
        try:
            call, logits = _scored(forward, pooling)
        except Missed as missed:
            reason = missed.reason.after(f"nearest is {VARIANT}")
            yield Site(OP, target, Status.MISSED, reason=reason, part=PART, lineno=pooling.lineno)
            continue
        score, hidden_states = view.text(call.func), view.text(call.args[0])
        kernel, operands = free_name(forward, "kernel"), f"{hidden_states}, {score}"
        lines = (
            "(",
            f"    {kernel}({operands})",
            f"    if ({kernel} := {slot_name(OP, VARIANT)}.kernel(self, {operands})) is not None",
            f"    else {view.text(call)}",
            ")",
        )
        asking = in_place(view, call, f"\n{view.document.indent(call)}".join(lines))
        yield Site.asking(
            OP,
            target,
            VARIANT,
            call,
            (asking, *_fields(view, forward, pooling)),
            form=VARIANT,
            captures={"score": score, "hidden_states": hidden_states, "logits": logits},
            imports=(_IMPORT,),
            part=PART,
        )


def pooling_in(forward: FunctionNode) -> ast.Assign | None:
    """The statement that pools scores: it binds the output's logits to a part or a mean of another name."""
    nodes = list(walk_ast(forward))
    outputs = (OUTPUT.match(node) for node in nodes if isinstance(node, ast.Return))
    pooled = {output["POOLED"] for output in outputs if output is not None}
    assigned = [node for node in nodes if isinstance(node, ast.Assign)] if pooled else []
    values = bound_once(nodes) if assigned else {}
    called = ((node, getattr(substituted(node.value, values), "func", node)) for node in assigned)
    scores = bound_names(node for node, function in called if own_attribute(function))
    for node in assigned:
        name = chain(node.targets[0])
        if name in pooled and read_names(node.value) & (scores - {name}) and _selects(node.value):
            return node
    return None


def _selects(value: ast.expr) -> bool:
    """Whether an expression selects one position of each row, or is a mean over positions."""
    if (selected := SELECTED.match(value)) is not None:
        return not isinstance(selected.expression("ROWS"), ast.Slice)
    return (
        isinstance(value, ast.Call) and not own_attribute(value.func) and "mean" in called_attributes(value)
    )


def _scored(forward: FunctionNode, pooling: ast.Assign) -> tuple[ast.Call, str]:
    """The call that scores all positions, and the name of what it returns."""
    if pooling not in forward.body:
        raise Missed("scores are pooled in a branch", pooling, Code.NO_ROOM)
    if (selected := POOLED.match(pooling.value)) is None:
        said = f"scores are not selected by position for every row: {ast.unparse(pooling.value)[:60]}"
        raise Missed(said, pooling, Code.OTHER_FORM)
    name = selected["SCORES"]
    call = bound_once(walk_ast(forward)).get(name)
    if call is None or (name, call) not in map(binding, forward.body):
        raise Missed(f"{name} is bound more than once, or in a branch", pooling, Code.NO_ROOM)
    if not isinstance(call, ast.Call) or not chain(call.func).startswith("self."):
        raise Missed(f"{name} is not the result of a module", call, Code.OTHER_FORM)
    if SCORED.match(call) is None or not is_plain(call.args[0]):
        raise Missed(f"{ast.unparse(call.func)} takes more than hidden states", call, Code.OTHER_ARGUMENTS)
    harmless = (template.match(node) for node in walk_ast(forward) for template in HARMLESS)
    known = {match.expression("SCORES") for match in (selected, *harmless) if match is not None}
    names = (node for node in walk_ast(forward) if isinstance(node, ast.Name) and node.id == name)
    for node in names:
        if isinstance(node.ctx, ast.Load) and node not in known:
            raise Missed(f"{name} is used in another way", node, Code.USED_OTHERWISE)
    return call, name


def _fields(view: ModuleView, forward: FunctionNode, pooling: ast.Assign) -> Iterator[Edit]:
    """Edits of the statement that returns the output, which gets requested fields."""
    match = FULL.match(forward.body[-1], POOLED=chain(pooling.targets[0]))
    if match is not None and chain(match.expression("LOSS")) and "labels" in parameter_names(forward):
        output = getattr(match.first, "value")  # noqa: B009
        start, end = view.document.start(output), view.document.end(output)
        yield Edit(start, start, "veomni_classes.output(self, labels, ")
        yield Edit(end, end, ")")

"""Sequence classifiers: all positions are scored, but only one position's score per row is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import bound_names, free_name, read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import bound_once, chain, is_plain, own_attribute, substituted, walk_ast
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "find", "is_candidate"]

OP = "linear_cross_entropy"
VARIANT = "last_token"
CANDIDATES = (
    "Every forward whose output's logits are selected from, or a mean of, what one of its modules makes: it "
    "scores all positions of a sequence and classifies by one of them."
)
PART = "sequence_classification"  # of the op's candidates
SELECTED = Template("SCORES[ROWS, POSITIONS]", names="SCORES")
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


def is_candidate(forward: FunctionNode) -> bool:
    """Whether ``forward`` pools scores of positions."""
    return _pooling(forward) is not None


def find(view: ModuleView) -> Iterator[Site]:
    """Every forward that pools scores of positions."""
    for owner, forward in view.forwards():
        pooling = _pooling(forward) if "logits" in view.text(forward) else None
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
        yield Site.asking(
            OP,
            target,
            VARIANT,
            call,
            (*_edits(view, forward, call), *_fields(view, forward, pooling)),
            form=VARIANT,
            captures={"score": score, "hidden_states": hidden_states, "logits": logits},
            imports=(_IMPORT,),
            part=PART,
        )


def _pooling(forward: FunctionNode) -> ast.Assign | None:
    """The statement that pools: it binds the output's logits to a part or a mean of another name."""
    returned = (node.value for node in walk_ast(forward) if isinstance(node, ast.Return))
    outputs = (keyword for call in returned if isinstance(call, ast.Call) for keyword in call.keywords)
    pooled = {chain(keyword.value) for keyword in outputs if keyword.arg == "logits"} - {""}
    values = bound_once(walk_ast(forward))
    assigned = [node for node in walk_ast(forward) if isinstance(node, ast.Assign)]
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
    if not isinstance(value, ast.Call) or own_attribute(value.func):
        return False
    return any(isinstance(node, ast.Attribute) and node.attr == "mean" for node in walk_ast(value))


def _scored(forward: FunctionNode, pooling: ast.Assign) -> tuple[ast.Call, str]:
    """The call that scores all positions, and the name of what it returns."""
    picked = pooling.value
    if pooling not in forward.body:
        raise Missed("scores are pooled in a branch", pooling, Code.NO_ROOM)
    selected = SELECTED.match(picked)
    if selected is None:
        raise Missed(
            f"scores are computed, not selected: {ast.unparse(picked)[:60]}", picked, Code.OTHER_FORM
        )
    rows = selected.expression("ROWS")
    if not isinstance(rows, ast.Call) or not chain(rows.func).endswith(".arange"):
        raise Missed("scores are not selected by position for every row", picked, Code.OTHER_FORM)
    name = selected["SCORES"]
    uses = [node for node in walk_ast(forward) if isinstance(node, ast.Name) and node.id == name]
    bindings = [node for node in uses if not isinstance(node.ctx, ast.Load)]
    statement = next((each for each in forward.body if getattr(each, "targets", None) == bindings), None)
    if len(bindings) != 1 or not isinstance(statement, ast.Assign):
        raise Missed(f"{name} is bound more than once, or in a branch", pooling, Code.NO_ROOM)
    call = statement.value
    if not isinstance(call, ast.Call) or not chain(call.func).startswith("self."):
        raise Missed(f"{name} is not the result of a module", statement, Code.OTHER_FORM)
    if len(call.args) != 1 or call.keywords or not is_plain(call.args[0]):
        raise Missed(f"{ast.unparse(call.func)} takes more than hidden states", call, Code.OTHER_ARGUMENTS)
    harmless = (template.match(node) for node in walk_ast(forward) for template in HARMLESS)
    allowed = [selected, *filter(None, harmless)]
    known = {*bindings, *(found.expression("SCORES") for found in allowed)}
    for node in uses:
        if node not in known:
            raise Missed(f"{name} is used in another way", node, Code.USED_OTHERWISE)
    return call, name


def _edits(view: ModuleView, forward: FunctionNode, call: ast.Call) -> tuple[Edit, ...]:
    kernel, slot = free_name(forward, "kernel"), slot_name(OP, VARIANT)
    hidden_states, score = view.text(call.args[0]), view.text(call.func)
    indent = view.document.indent(call)
    lines = (
        "(",
        f"    {kernel}({hidden_states}, {score})",
        f"    if ({kernel} := {slot}.kernel(self, {hidden_states}, {score})) is not None",
        f"    else {view.text(call)}",
        ")",
    )
    return (in_place(view, call, f"\n{indent}".join(lines)),)


def _fields(view: ModuleView, forward: FunctionNode, pooling: ast.Assign) -> Iterator[Edit]:
    """Edits of the statement that returns the output, which gets requested fields."""
    last = forward.body[-1]
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Call):
        return
    given = {keyword.arg: chain(keyword.value) for keyword in last.value.keywords}
    parameters = {each.arg for each in (*forward.args.args, *forward.args.kwonlyargs)}
    if given.get("loss") and given.get("logits") == chain(pooling.targets[0]) and "labels" in parameters:
        start, end = view.document.start(last.value), view.document.end(last.value)
        yield Edit(start, start, "veomni_classes.output(self, labels, ")
        yield Edit(end, end, ")")

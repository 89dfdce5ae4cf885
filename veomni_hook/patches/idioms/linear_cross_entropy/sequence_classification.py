"""Sequence classifiers: all positions are scored, but only one position's score per row is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import bound_names, free_name, read_names
from veomni_hook.patches.code.tree import bound_once, chain, is_plain, own_attribute, substituted, walk_ast
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed, Site, Status
from veomni_hook.patches.slots import formula_slot

__all__ = ["CANDIDATES", "OP", "find", "is_candidate"]

OP = "linear_cross_entropy"
VARIANT = "last_token"
CANDIDATES = (
    "Every forward whose output's logits are selected from, or a mean of, what one of its modules makes: it "
    "scores all positions of a sequence and classifies by one of them."
)
PART = "sequence_classification"  # of the op's candidates
#: The argument of transformers' loss of classes that gets the pooled scores.
_POOLED = "pooled_logits"
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
        site = partial(Site, OP, f"{owner.name}.forward", part=PART)
        try:
            call, logits = _scored(forward, pooling)
        except Missed as reason:
            yield site(Status.MISSED, reason=f"nearest is {VARIANT}: {reason}", lineno=pooling.lineno)
            continue
        slot = formula_slot(OP, VARIANT)
        yield site(
            Status.ROUTED,
            variant=VARIANT,
            form=VARIANT,
            captures={
                "score": view.text(call.func),
                "hidden_states": view.text(call.args[0]),
                "logits": logits,
            },
            edits=(*_edits(view, forward, call, slot.name), *_fields(view, forward, pooling)),
            slots=(slot,),
            imports=(_IMPORT,),
            lineno=call.lineno,
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
    match value:
        case ast.Subscript(value=ast.Name(), slice=ast.Tuple(elts=[rows, _])):
            return not isinstance(rows, ast.Slice)
        case ast.Call() if not own_attribute(value.func):
            return any(isinstance(node, ast.Attribute) and node.attr == "mean" for node in walk_ast(value))
    return False


def _scored(forward: FunctionNode, pooling: ast.Assign) -> tuple[ast.Call, str]:
    """The call that scores all positions, and the name of what it returns."""
    picked = pooling.value
    if pooling not in forward.body:
        raise Missed("scores are pooled in a branch", pooling)
    if not isinstance(picked, ast.Subscript) or not isinstance(picked.value, ast.Name):
        raise Missed(f"scores are computed, not selected: {ast.unparse(picked)[:60]}", picked)
    index = picked.slice.elts if isinstance(picked.slice, ast.Tuple) else []
    if len(index) != 2 or not isinstance(index[0], ast.Call) or not chain(index[0].func).endswith(".arange"):
        raise Missed("scores are not selected by position for every row", picked)
    name = picked.value.id
    bindings = [node for node in _uses(forward, name) if not isinstance(node.ctx, ast.Load)]
    assigned = (s for s in forward.body if isinstance(s, ast.Assign) and s.targets[0] in bindings)
    statement = next(assigned, None)
    if len(bindings) != 1 or statement is None or len(statement.targets) != 1:
        raise Missed(f"{name} is bound more than once, or in a branch", pooling)
    call = statement.value
    if not isinstance(call, ast.Call) or not chain(call.func).startswith("self."):
        raise Missed(f"{name} is not the result of a module", statement)
    if len(call.args) != 1 or call.keywords or not is_plain(call.args[0]):
        raise Missed(f"{ast.unparse(call.func)} takes more than hidden states", call)
    allowed = {id(picked.value), *map(id, bindings), *_harmless(forward, name)}
    for node in _uses(forward, name):
        if id(node) not in allowed:
            raise Missed(f"{name} is used in another way", node)
    return call, name


def _uses(forward: FunctionNode, name: str) -> list[ast.Name]:
    return [node for node in walk_ast(forward) if isinstance(node, ast.Name) and node.id == name]


def _harmless(forward: FunctionNode, name: str) -> Iterator[int]:
    """Uses of all scores that need no scores: their device, the number of rows, an argument of the loss.

    The kernel checks whether the loss is the one that uses pooled scores only.
    """
    for node in walk_ast(forward):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            rows = isinstance(node.slice, ast.Constant) and node.slice.value == 0
            if rows and node.value.attr == "shape" and chain(node.value.value) == name:
                yield id(node.value.value)
        if isinstance(node, ast.Attribute) and node.attr == "device" and chain(node.value) == name:
            yield id(node.value)
        if isinstance(node, ast.Call) and chain(node.func) == "self.loss_function":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if _POOLED in given and chain(given.get("logits", node)) == name:
                yield id(given["logits"])


def _edits(view: ModuleView, forward: FunctionNode, call: ast.Call, slot: str) -> tuple[Edit, ...]:
    kernel = free_name(forward, "kernel")
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

"""Decide on the layer loop of one model: what to slice before it and where to gather, or why not."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import loaded, own_names, parameter_names
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import calls_in, last_name, own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.additions import Addition, addition_in
from veomni_hook.patches.idioms.layer_loop.attention import Queries
from veomni_hook.patches.idioms.layer_loop.positions import Positions
from veomni_hook.patches.idioms.layer_loop.values import (
    NOTHING,
    POSITIONS,
    Module,
    Tensor,
    Value,
    Whole,
    classes_in,
    depends,
    is_positional,
    is_shaped,
    of_all,
    shaped,
)
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.interpreter.walk import bound, evaluate, receiver_name, run
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed
from veomni_hook.patches.upstream_names import names

__all__ = ["CROSS", "Loop", "after_loop", "decided", "hidden_of", "index_of", "loops"]

_WRAPPERS = ("enumerate", "zip", "reversed", "list", "tuple")
CROSS = "cross attention: the layers also attend to another model's output"
_NORM = Template("HIDDEN = self.NORM(HIDDEN)")
#: Hidden states, or several streams of them.
_HIDDEN = ("B S .", "B S . .")


@dataclass(frozen=True)
class Loop:
    """What to do with a loop over layers.

    Attributes:
        statement: the loop, a statement of the forward's body.
        hidden: the name of the hidden states.
        others: the names of what else is sliced.
        following: the first statement that works on all positions again.
        followed: the functions and methods of the file that run inside.
        masks: arguments inside that must be a part of a mask of padding.
        addition: the statement inside that adds rows.
        ids: the names of token ids that the layers get.
        queries: methods of attention inside, by their node, that get the keys of all positions.
        refusals: where branches of attention begin that are refused when they run, and why.
        absent: the forward's parameters that must be None.
        boundaries: the names of the boundaries of segments, in a tower.
        aside: where the loop of a tower reads the hidden states for something that no layer gets.
    """

    statement: ast.For
    hidden: str
    others: tuple[str, ...]
    following: ast.stmt
    followed: tuple[str, ...]
    masks: tuple[ast.expr, ...] = ()
    addition: Addition | None = None
    ids: tuple[str, ...] = ()
    queries: Mapping[int, Queries] = field(default_factory=dict)
    refusals: Mapping[int, tuple[ast.stmt, str]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    boundaries: tuple[str, ...] = ()
    aside: tuple[ast.Name, ...] = ()


def loops(forward: FunctionNode) -> Iterator[ast.For]:
    """The loops of a forward that call each of the modules in one of its own lists."""
    for node in walk_ast(forward):
        if not isinstance(node, ast.For) or not any(map(own_attribute, walk_ast(node.iter))):
            continue
        names = {name.id for name in walk_ast(node.target) if isinstance(name, ast.Name)}
        callees = [call.func for call in calls_in(node)]
        # Older code passes `layer.__call__` to its function for checkpointing.
        handed = [argument for call in calls_in(node) for argument in call.args[:1]]
        attributes = [part for part in (*callees, *handed) if isinstance(part, ast.Attribute)]
        callees += [attribute.value for attribute in attributes if attribute.attr == "__call__"]
        if any(isinstance(callee, ast.Name) and callee.id in names for callee in callees):
            yield node


def decided(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, layer_loops: list[ast.For]) -> Loop:
    """What to do with the loop of a model.

    Raises:
        Missed: it is refused; the text says why.
    """
    statement = layer_loops[0]
    absent = _absent(forward)
    if any("cross_attn" in last_name(node) for node in walk_ast(statement)) or absent is None:
        raise Missed(CROSS, statement, Code.OTHER_LOOP)
    at = index_of(forward, layer_loops)
    if _collects(statement):
        reason = CROSS if absent else "layers' outputs are collected inside the loop"
        raise Missed(reason, statement, Code.OTHER_LOOP)
    errors = []
    # Models with several kinds of positions (text, height, width) have one more dimension.
    for ids in ("B S", ". B S"):
        try:
            return _read(view, owner, forward, at, shaped(ids), absent)
        except Missed as error:
            errors.append(error)
    if absent:
        raise Missed(CROSS, statement, Code.OTHER_LOOP)
    raise errors[0]


def _absent(forward: FunctionNode) -> tuple[str, ...] | None:
    """The parameters for another model's output, which may be None; None if it has such an output anyhow."""
    read = [name for name in names("another model's output") if name in loaded(forward.body)]
    defaults, stored = bound(forward, (), {}).defaults, own_names(forward.body)
    for name in read:
        match defaults.get(name):
            case ast.Constant(value=None) if name not in stored:
                continue
        return None
    return tuple(read)


def index_of(forward: FunctionNode, layer_loops: list[ast.For]) -> int:
    """Where the only loop over layers is in the body of its forward.

    Raises:
        Missed: there are several, it is inside another statement, or it is the last one.
    """
    statement, *others = layer_loops
    reason = ""
    if others:
        reason = f"there is another loop over layers at line {others[0].lineno}"
    elif statement not in forward.body:
        reason = "the loop is inside another statement"
    elif statement is forward.body[-1]:
        reason = "nothing follows the loop"
    if reason:
        raise Missed(reason, statement, Code.OTHER_LOOP)
    return forward.body.index(statement)


def _collects(loop: ast.For) -> bool:
    """Whether a loop adds to tuples or lists."""
    for node in walk_ast(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Tuple | ast.List):
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, ast.Tuple):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            return True
    return False


def hidden_of(loop: ast.For) -> str:
    """The name of the hidden states: the first argument of the layer's call.

    Raises:
        Missed: no layer is called, or it does not get a name.
    """
    names = {name.id for name in walk_ast(loop.target) if isinstance(name, ast.Name)}
    for node in walk_ast(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            first = [
                *node.args[:1],
                *(keyword.value for keyword in node.keywords if keyword.arg == "hidden_states"),
            ]
            if first and isinstance(first[0], ast.Name):
                return first[0].id
            raise Missed("the layers do not get their hidden states by name", node, Code.OTHER_LOOP)
    raise Missed("the layers are not called directly", loop, Code.OTHER_LOOP)


def after_loop(
    positions: Positions, loop: ast.For, scope: dict[str, Value], but: Collection[ast.stmt]
) -> dict[str, Value]:
    """What is known of names after a loop over layers, without some of its statements.

    Raises:
        Missed: it moves or mixes positions, or cannot be followed.
    """
    frame = Frame(positions, dict(scope))
    if not classes_in([evaluate(loop.iter, frame)]):
        raise Missed("the classes of the layers are not known", loop, Code.UNKNOWN_MODULE)
    body = [statement for statement in loop.body if statement not in but]
    rest = ast.For(loop.target, loop.iter, body, loop.orelse, loop.type_comment)
    run([ast.copy_location(rest, loop)], frame)
    return frame.values


def _read(
    view: ModuleView,
    owner: ast.ClassDef,
    forward: FunctionNode,
    at: int,
    ids: Tensor,
    absent: tuple[str, ...],
) -> Loop:
    """Follow a forward whose statement ``at`` is the loop: its positions may be ``ids``, ``absent`` is None.

    Raises:
        Missed: the loop is refused.
    """
    statement, tail = forward.body[at], forward.body[at + 1 :]
    assert isinstance(statement, ast.For)  # noqa: S101 - it is the loop
    hidden, positions = hidden_of(statement), Positions(view)
    positions.absent = frozenset(absent)
    addition = addition_in(view, owner, forward, statement, hidden)
    scope = _before(positions, owner, forward, at, ids)
    positions.followed.clear()
    if not is_shaped(scope.get(hidden), *_HIDDEN):
        text = f"how {hidden} are made is not followed, so they may not be [batch, positions, width]"
        raise Missed(text, statement)
    read = [name for name in dict.fromkeys(loaded([statement])) if name != hidden and name in scope]
    others = tuple(name for name in read if _is_sliceable(scope[name]))
    tokens = tuple(name for name in read if name in names("token ids") and is_shaped(scope[name], "B S"))
    parts = (*others, *tokens, hidden)
    whole = [name for name, value in scope.items() if name not in parts and depends(value)]
    scope.update({name: Whole(name) for name in whole})
    for name in (*others, *tokens):
        if name in loaded(tail):
            text = f"{name} is sliced for the layers and used after them"
            raise Missed(text, statement, Code.USED_OTHERWISE)
    scope = after_loop(positions, statement, scope, [addition.statement] if addition is not None else [])
    if not is_shaped(scope.get(hidden), *_HIDDEN):
        raise Missed(f"{hidden} has another shape after the loop", statement, Code.OTHER_LOOP)
    if len(tail) > 1 and isinstance(_NORM.find([tail[:1]], HIDDEN=hidden), Found):
        frame = Frame(positions, dict(scope))
        with suppress(Missed):
            run(tail[:1], frame)
            if is_shaped(frame.values[hidden], *_HIDDEN):
                tail = tail[1:]
    for name in dict.fromkeys(loaded(tail)):
        if name != hidden and depends(scope.get(name)):
            text = f"{name} is used after the loop, and holds a part of the positions"
            raise Missed(text, tail[0], Code.USED_OTHERWISE)
    added = {addition.target} if addition is not None else set()
    followed = tuple(sorted({*positions.followed, *added}))
    return Loop(
        statement,
        hidden,
        others,
        tail[0],
        followed,
        tuple(positions.masks.values()),
        addition,
        ids=tokens,
        queries={key: queries for key, queries in positions.queries.items() if queries is not None},
        refusals=positions.refusals,
        absent=absent,
    )


def _before(
    positions: Positions, owner: ast.ClassDef, forward: FunctionNode, at: int, ids: Tensor
) -> dict[str, Value]:
    """What is known of names before the loop; what cannot be followed there holds all positions."""
    known: dict[str, Value] = {
        "input_ids": shaped("B S"),
        "inputs_embeds": shaped("B S ."),
        "token_type_ids": shaped("B S"),
        "position_ids": ids,
    }
    scope: dict[str, Value] = {name: Whole(name) for name in parameter_names(forward)}
    scope.update(dict.fromkeys(positions.absent, NOTHING))
    scope[receiver_name(forward)] = Module((owner.name,))
    if forward.args.kwarg is not None:
        scope[forward.args.kwarg.arg] = Whole(f"**{forward.args.kwarg.arg}")
    positions.before = True
    for statement in (ast.Pass(), *forward.body[:at]):
        names, frame = own_names([statement]), Frame(positions, dict(scope))
        try:
            run([statement], frame)
        except Missed:
            scope.update({name: Whole(name) for name in names})
        else:
            scope = frame.values
            scope.update({name: Whole(name) for name in names if isinstance(scope.get(name), Whole)})
        scope.update({name: value for name, value in known.items() if name in scope})
    positions.before = False
    return scope


def _is_sliceable(value: Value) -> bool:
    """Whether a value is a tensor ``[..., positions, width]``, or holds only such tensors."""
    parts = [part for part in of_all([value]) if part != NOTHING]
    return bool(parts) and all(
        isinstance(part, Tensor)
        and len(part.dims) >= 3
        and part.dims[-2] == (POSITIONS,)
        and sum(map(is_positional, part.dims)) == 1
        for part in parts
    )

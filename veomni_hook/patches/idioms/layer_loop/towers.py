"""Layer loops of towers whose attention stays within segments of a packed sequence: images, frames, chunks.

    for block in self.blocks:
        hidden_states = block(hidden_states, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings)

Layers must work on each row by itself, except attention, which splits query, key and value at boundaries
(`veomni_hook.patches.idioms.varlen_attention.read`). Then a part of the segments gives a part of the result,
whatever was computed before the loop. So only the loop is evaluated; what enters it is checked when it runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import loaded, own_names, parameter_names
from veomni_hook.patches.code.tree import own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.positions import Positions
from veomni_hook.patches.idioms.layer_loop.values import (
    POSITIONS,
    Items,
    Module,
    NotARow,
    Size,
    Tensor,
    Unknown,
    Value,
    Whole,
    fresh,
    is_positional,
    of_all,
    of_tower,
)
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.interpreter.walk import evaluate, run
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed

__all__ = ["Tower", "decided_tower"]


@dataclass(frozen=True)
class Tower:
    """What to do with the loop of a tower.

    Attributes:
        statement: the loop, a statement of the forward's body.
        hidden: the name of the hidden states ``[rows, width]``.
        boundaries: the names of the boundaries of segments.
        tables: the names of what has a row for each row of the hidden states.
        aside: where the loop reads the hidden states for something that no layer gets.
        following: the statement after the loop.
        followed: the functions and methods of the file that run inside.
    """

    statement: ast.For
    hidden: str
    boundaries: tuple[str, ...]
    tables: tuple[str, ...]
    aside: tuple[ast.Name, ...]
    following: ast.stmt
    followed: tuple[str, ...]


def decided_tower(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, found: list[ast.For], hidden: str
) -> Tower:
    """What to do with the loop of a tower, whose hidden states are called ``hidden``.

    Raises:
        Missed: it runs as a whole; the text says why.
    """
    statement = found[0]
    if len(found) > 1:
        raise Missed(
            f"there is another loop over layers at line {found[1].lineno}", statement, Code.OTHER_LOOP
        )
    if statement not in forward.body or statement is forward.body[-1]:
        raise Missed("the loop is inside another statement, or the last one", statement, Code.OTHER_LOOP)
    at = forward.body.index(statement)
    before, tail = forward.body[:at], forward.body[at + 1 :]
    asides = [each for each in statement.body if _is_aside(each, statement, hidden)]
    known = parameter_names(forward) | own_names(before)
    receiver = forward.args.args[0].arg
    given = [name for name in dict.fromkeys(loaded([statement])) if name in known - {receiver, hidden}]
    tables: dict[str, Value] = {}
    while True:
        scope: dict[str, Value] = {name: of_tower(name) for name in given} | tables
        scope[receiver] = Module((owner.name,))
        scope[hidden] = Tensor(((POSITIONS,), fresh()))
        if forward.args.kwarg is not None and forward.args.kwarg.arg in scope:
            scope[forward.args.kwarg.arg] = Whole(f"**{forward.args.kwarg.arg}")
        before_loop = dict(scope)
        positions = Positions(view, tower=True)
        try:
            scope = _followed(positions, statement, asides, scope)
        except NotARow as error:
            if error.name in tables or error.name not in given:
                raise Missed(str(error.reason), code=Code.NO_BOUNDARIES) from None
            tables[error.name] = _table(error.parts)
        else:
            break
    changed = {name: value for name, value in scope.items() if value != before_loop.get(name)}
    _check_after(
        statement, hidden, {**changed, hidden: scope[hidden]}, positions.boundaries, tables, [*asides, *tail]
    )
    return Tower(
        statement,
        hidden,
        tuple(sorted(positions.boundaries)),
        tuple(tables),
        tuple(_names(asides, hidden)),
        tail[0],
        tuple(sorted(positions.followed)),
    )


def _table(parts: int) -> Value:
    """A tensor with a row for each row of the hidden states; several of them if ``parts`` is not 0."""
    one = Tensor(((POSITIONS,), fresh()))
    return Items((one,) * parts) if parts else one


def _is_aside(statement: ast.stmt, loop: ast.For, hidden: str) -> bool:
    """Whether a statement of a loop only reads the hidden states, and no layer gets what it computes.

    if index in self.deepstack_visual_indexes:
        features.append(self.mergers[self.deepstack_visual_indexes.index(index)](hidden_states))
    """
    if not isinstance(statement, ast.If) or not list(_names([statement], hidden)):
        return False
    made = own_names([statement])
    rest = [each for each in loop.body if each is not statement]
    return hidden not in made and not made & {*loaded(rest), *own_names(rest)}


def _names(statements: Iterable[ast.stmt], name: str) -> list[ast.Name]:
    nodes = [node for each in statements for node in walk_ast(each)]
    return [node for node in nodes if isinstance(node, ast.Name) and node.id == name]


def _followed(
    positions: Positions, loop: ast.For, asides: list[ast.stmt], scope: dict[str, Value]
) -> dict[str, Value]:
    """What is known of names after the loop."""
    frame = Frame(positions, dict(scope))
    value = evaluate(loop.iter, frame)
    if not any(isinstance(each, Module) for each in of_all([value])):
        raise Missed("the classes of the layers are not known", loop, Code.UNKNOWN_MODULE)
    body = [each for each in loop.body if each not in asides]
    rest = ast.copy_location(ast.For(loop.target, loop.iter, body, loop.orelse, loop.type_comment), loop)
    run([rest], frame)
    return frame.values


def _check_after(
    loop: ast.For,
    hidden: str,
    scope: dict[str, Value],
    boundaries: set[str],
    tables: dict[str, Value],
    others: list[ast.stmt],
) -> None:
    """Raise if what the loop leaves is not what upstream's code behind it, or beside it, expects."""
    value = scope.get(hidden)
    dims = value.dims if isinstance(value, Tensor) else ()
    if len(dims) != 2 or dims[0] != (POSITIONS,) or is_positional(dims[1]):
        raise Missed(f"{hidden} has another shape after the loop", loop, Code.OTHER_LOOP)
    if not boundaries:
        raise Missed("its attention has no boundaries", loop, Code.NO_BOUNDARIES)
    if boundaries & tables.keys():
        raise Missed("it computes with boundaries", loop, Code.NO_BOUNDARIES)
    layers = {name for name in map(own_attribute, walk_ast(loop.iter)) if name}
    for name in loaded(others):
        if name in boundaries or name in tables or (name != hidden and _is_part(scope.get(name))):
            raise Missed(
                f"{name} is used beside the layers, and holds a part of the rows", loop, Code.USED_OTHERWISE
            )
    if any(own_attribute(node) in layers for each in others for node in walk_ast(each)):
        raise Missed("the layers are called beside the loop", loop, Code.OTHER_LOOP)


def _is_part(value: Value | None) -> bool:
    held = of_all([value]) if value is not None else ()
    return any(
        (isinstance(each, Whole) and len(each.rows) != 1)
        or isinstance(each, Tensor | Unknown)
        or (isinstance(each, Size) and is_positional(each.dim))
        for each in held
    )

"""Layer loops of towers whose attention stays within segments of a packed sequence: images, frames, chunks.

    for block in self.blocks:
        hidden_states = block(hidden_states, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings)

Layers must work on each row by itself, except attention, which splits query, key and value at boundaries
(`veomni_hook.patches.idioms.varlen_attention`). Then a part of the segments gives a part of the result,
whatever was computed before the loop. So only the loop is evaluated; what enters it is checked when it runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import loaded, own_names, parameter_names
from veomni_hook.patches.code.tree import own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.loop import Loop, after_loop, hidden_of, index_of
from veomni_hook.patches.idioms.layer_loop.positions import Positions
from veomni_hook.patches.idioms.layer_loop.values import (
    Items,
    Module,
    NotARow,
    Value,
    Whole,
    depends,
    is_shaped,
    of_all,
    shaped,
)
from veomni_hook.patches.interpreter.walk import receiver_name
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed

__all__ = ["decided_tower"]


def decided_tower(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, layer_loops: list[ast.For]
) -> Loop:
    """What to do with the loop of a tower.

    Raises:
        Missed: it runs as a whole; the text says why.
    """
    statement, hidden = layer_loops[0], hidden_of(layer_loops[0])
    at = index_of(forward, layer_loops)
    before, tail = forward.body[:at], forward.body[at + 1 :]
    asides = [aside for aside in statement.body if _is_aside(aside, statement, hidden)]
    receiver = receiver_name(forward)
    known = (parameter_names(forward) | own_names(before)) - {receiver, hidden}
    inputs: dict[str, Value] = {
        name: Whole(f"{name} of the tower", rows=(name,)) for name in loaded([statement]) if name in known
    }
    if forward.args.kwarg is not None and forward.args.kwarg.arg in inputs:
        inputs[forward.args.kwarg.arg] = Whole(f"**{forward.args.kwarg.arg}")
    tables: dict[str, Value] = {}
    while True:
        scope = inputs | tables | {receiver: Module((owner.name,)), hidden: shaped("S .")}
        positions = Positions(view, tower=True)
        try:
            after = after_loop(positions, statement, scope, asides)
        except NotARow as error:
            if error.name in tables or error.name not in inputs:
                raise Missed(error.reason, code=Code.NO_BOUNDARIES) from None
            # It may be a tensor with a row for each row of the hidden states, or several of them.
            tables[error.name] = Items((shaped("S ."),) * error.parts) if error.parts else shaped("S .")
        else:
            break
    changed = {name: value for name, value in after.items() if name == hidden or value != scope.get(name)}
    _check_after(statement, hidden, changed, positions.boundaries, tables, [*asides, *tail])
    return Loop(
        statement,
        hidden,
        tuple(tables),
        tail[0],
        tuple(sorted(positions.followed)),
        boundaries=tuple(sorted(positions.boundaries)),
        aside=tuple(_names(asides, hidden)),
    )


def _is_aside(statement: ast.stmt, loop: ast.For, hidden: str) -> bool:
    """Whether a statement of a loop only reads the hidden states, and no layer gets what it computes.

    if index in self.deepstack_visual_indexes:
        features.append(self.mergers[self.deepstack_visual_indexes.index(index)](hidden_states))
    """
    if not isinstance(statement, ast.If) or not list(_names([statement], hidden)):
        return False
    names = own_names([statement])
    rest = [other for other in loop.body if other is not statement]
    return hidden not in names and not names & {*loaded(rest), *own_names(rest)}


def _names(statements: Iterable[ast.stmt], name: str) -> list[ast.Name]:
    nodes = [node for statement in statements for node in walk_ast(statement)]
    return [node for node in nodes if isinstance(node, ast.Name) and node.id == name]


def _check_after(
    loop: ast.For,
    hidden: str,
    scope: dict[str, Value],
    boundaries: set[str],
    tables: dict[str, Value],
    others: list[ast.stmt],
) -> None:
    """Raise if what the loop leaves is not what upstream's code behind it, or beside it, expects."""
    if not is_shaped(scope.get(hidden), "S ."):
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
    if any(own_attribute(node) in layers for other in others for node in walk_ast(other)):
        raise Missed("the layers are called beside the loop", loop, Code.OTHER_LOOP)


def _is_part(value: Value | None) -> bool:
    parts = of_all([value]) if value is not None else ()
    return depends(value) or any(isinstance(part, Whole) and len(part.rows) != 1 for part in parts)

"""The layer loop of base models: sliced before it and gathered after it, or refused with a reason.

With sequence parallelism, every rank of a group has the same batch, and a model's layers run on a part of its
positions. Masks, positions and rotary tables are made before the loop at full length, so nothing of them
changes. What runs in the loop is evaluated on what is known of the positions
(`veomni_hook.patches.idioms.layer_loop.interpreter`): it must work on each position by itself, except in
attention of the user's implementation, which gets all positions. Everything else is refused.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.idioms.layer_loop.loop import Loop, decided, loops
from veomni_hook.patches.idioms.layer_loop.modules import method_of
from veomni_hook.patches.idioms.layer_loop.reasons import reason_for
from veomni_hook.patches.idioms.layer_loop.values import Unproven
from veomni_hook.patches.routes.insertion import before_statement
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "layer_loop"
CANDIDATES = (
    "every forward that takes input_ids and loops over modules of its own, calling each; towers that take no "
    "input_ids run at full length on every rank"
)

_IMPORT = ("veomni_hook.parallel", "sequence as veomni_sequence")
_SHARDED, _REFUSED = "sharded", "refused"


def find(view: ModuleView) -> Iterator[Site]:
    """Every layer loop of a module."""
    for owner, forward in view.forwards():
        if "input_ids" in {each.arg for each in (*forward.args.args, *forward.args.kwonlyargs)}:
            if found := list(loops(forward)):
                yield _site(view, owner, forward, found)


def _site(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, found: list[ast.For]) -> Site:
    site = partial(Site, OP, f"{owner.name}.forward", lineno=found[0].lineno, imports=(_IMPORT,))
    try:
        loop = decided(view, owner, forward, found)
        for other in _inheriting(view, owner):
            decided(view, other, forward, found)
        edits = _sliced_and_gathered(view, forward, loop)
    except Unproven as error:
        reason = reason_for(view, owner, found[0], str(error))
        return site(Status.REFUSED, reason=reason, edits=_refused(view, forward, found[0], reason))
    return site(
        Status.ROUTED,
        variant=_SHARDED,
        captures={"hidden_states": loop.hidden, **{name: name for name in loop.others}},
        edits=edits,
        relies_on=loop.followed,
    )


def _inheriting(view: ModuleView, owner: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """The other classes of the file that run the forward of ``owner``: their layers may be others."""
    for other in view.classes.values():
        found = method_of(view, other.name, "forward")
        if other is not owner and found is not None and found[1] == owner.name:
            yield other


def _sliced_and_gathered(view: ModuleView, forward: FunctionNode, loop: Loop) -> tuple[Edit, ...]:
    receiver = forward.args.args[0].arg
    following = forward.body.index(loop.last) + 1
    if following >= len(forward.body):
        raise Unproven("nothing follows the loop", loop.statement)
    names = ", ".join((loop.hidden, *loop.others))
    targets = names if loop.others else f"({loop.hidden},)"
    return (
        *before_statement(
            view,
            forward,
            loop.statement,
            f"{targets} = veomni_sequence.shard({receiver}, {names})",
            "sequence parallelism: the layers run on this rank's part of the positions",
        ),
        *before_statement(
            view,
            forward,
            forward.body[following],
            f"{loop.hidden} = veomni_sequence.gather({receiver}, {loop.hidden})",
            "sequence parallelism: all positions again",
        ),
    )


def _refused(view: ModuleView, forward: FunctionNode, loop: ast.For, reason: str) -> tuple[Edit, ...]:
    receiver = forward.args.args[0].arg
    holding = next(each for each in forward.body if any(inner is loop for inner in ast.walk(each)))
    code = f"veomni_sequence.refused({receiver}, {json.dumps(reason, ensure_ascii=False)})"
    return before_statement(view, forward, holding, code, "sequence parallelism: not for this model")

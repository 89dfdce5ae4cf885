"""Modules that work on each position by itself: they may run on some positions at a time.

Applies only with the setting ``memory``. A forward of one tensor is followed as the layers of sequence
parallelism are (`layer_loop`), without attention, experts, and other calls that mix positions. What is known
when it runs decides: a module in tiles must compute something that is wider than its input.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.tree import calls_in, initialised
from veomni_hook.patches.idioms.layer_loop.modules import method_of
from veomni_hook.patches.idioms.layer_loop.positions import Positions
from veomni_hook.patches.idioms.layer_loop.values import Arguments, Value, is_shaped, shaped
from veomni_hook.patches.routes.guards import decorate
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status

__all__ = ["CANDIDATES", "OP", "SETTING", "WORDS", "find"]

OP = "tiles"
WORDS = "Linear"
SETTING = "memory"
CANDIDATES = "every forward of one tensor that computes wide projections"

_IMPORT = ("veomni_hook.memory", "tiles as veomni_tiles")
_HIDDEN = "B S ."


def find(view: ModuleView) -> Iterator[Site]:
    """Every forward that may run in tiles."""
    for owner, forward in view.forwards():
        spec = forward.args
        calls = [call for _, value in initialised(owner) for call in calls_in(value)]
        projections = [call for call in calls if view.scope.dotted(call.func) == "torch.nn.Linear"]
        others = spec.kwonlyargs or spec.vararg or spec.kwarg
        if len(spec.args) != 2 or others or len(projections) < 2:
            continue
        target = f"{owner.name}.forward"
        try:
            followed = _by_position(view, owner)
        except Missed as error:
            yield Site(OP, target, Status.MISSED, reason=error.reason, lineno=forward.lineno)
            continue
        comment = "tiles: each position by itself, some at a time where that needs less memory"
        edits = decorate(view, owner, "veomni_tiles.by_position", comment)
        yield Site.calling(OP, target, "by_position", forward, edits, _IMPORT, relies_on=followed)


class _Alone(Positions):
    """Positions that meet no others: no attention, no experts."""

    def sent(self, name: str, arguments: Arguments) -> Value:
        raise Missed(f"{name} are experts, whose router may be watched", code=Code.OTHER_FORM)


def _by_position(view: ModuleView, owner: ast.ClassDef) -> tuple[str, ...]:
    """The definitions that the forward of a class uses, which works on each position by itself.

    Raises:
        Missed: it does not, or that of a class that inherits it.
    """
    followed: set[str] = set()
    for heir in view.classes.values():
        forward = method_of(view, heir.name, "forward")
        if forward is None or forward.home is not owner:
            continue
        positions = _Alone(view, tower=True)
        result = positions.of_method(forward, shaped(_HIDDEN))
        if positions.boundaries or not is_shaped(result, _HIDDEN):
            raise Missed("its result is not one tensor with its positions", owner, Code.OTHER_FORM)
        followed |= positions.followed.keys()
    return tuple(sorted(followed - {f"{owner.name}.forward"}))

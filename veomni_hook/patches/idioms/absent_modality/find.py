"""Forwards that call the tower of images, videos or sounds only for batches that have some.

    if pixel_values is not None:
        image_embeds = self.get_image_features(pixel_values, image_grid_thw, return_dict=True).pooler_output

Where processes share the tower's parameters, all must call it equally often; DistributedDataParallel needs
one call of it. So code in front of the condition calls `veomni_hook.multimodal.absent` where the data is
absent; it decides while the model runs whether to call the tower. The idiom asks for no kernel.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from textwrap import indent

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import calls_in, own_attribute
from veomni_hook.patches.idioms.absent_modality.elsewhere import elsewhere
from veomni_hook.patches.idioms.absent_modality.read import METHODS, Call, calls, read
from veomni_hook.patches.routes.guards import before_statement, tuple_of
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed, Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "absent_modality"
CANDIDATES = (
    "every call of self.get_image_features, self.get_video_features or self.get_audio_features in a forward,"
    " below an if, or in a method that the forward calls"
)
_IMPORT = ("veomni_hook.multimodal", "absent as veomni_absent")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    if not any(f"self.{name}(" in view.document.source for name in METHODS):
        return
    for owner, forward in view.forwards():
        apart = [
            (name, each)
            for name, method in view.helpers(owner, forward).items()
            for each in (calls_in(method) if name not in METHODS else ())
            if own_attribute(each.func) in METHODS
        ]
        for name, hidden in apart:
            reason = f"forward calls {name}, which calls it"
            yield Site(OP, f"{owner.name}.{name}", Status.MISSED, reason=reason, lineno=hidden.lineno)
        # Which of the places calls a tower last is not known then.
        too = Missed(f"{apart[0][0]} may call its tower, too", apart[0][1]) if apart else None
        found = [(call, too or _read(view, owner, forward, call, around)) for call, around in calls(forward)]
        every = [each for _, each in found if isinstance(each, Call)]
        for call, each in found:
            yield _site(view, f"{owner.name}.forward", forward, call, each, every)


def _read(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, call: ast.Call, around: list[ast.If]
) -> Call | Missed:
    try:
        return read(view, owner, forward, call, around)
    except Missed as reason:
        return reason


def _site(
    view: ModuleView,
    target: str,
    forward: FunctionNode,
    call: ast.Call,
    found: Call | Missed,
    every: Sequence[Call],
) -> Site:
    try:
        if isinstance(found, Missed):
            raise found
        code = _code(found, elsewhere(forward, found, every))
        comment = f"{own_attribute(call.func)} without data"
        edits = before_statement(view, forward, found.statement, code, comment)
    except (Missed, ValueError) as reason:
        return Site(OP, target, Status.MISSED, reason=str(reason), lineno=call.lineno)
    captures = {"data": ", ".join(found.given.data.values()), "towers": ", ".join(found.towers)}
    return Site.calling(OP, target, found.given.form, call, edits, _IMPORT, captures=captures)


def _code(found: Call, others: Sequence[str]) -> str:
    """The statement that is inserted in front of the condition; ``others``: when other places call."""
    names = ", ".join(found.given.data.values())
    layout = f'        layout="{found.given.layout}",\n' if found.given.layout else ""
    also = indent(f"elsewhere={tuple_of(others)},\n", " " * 8) if others else ""
    return f"""\
if {found.condition.without}:
    {found.embeddings} = veomni_absent.plus_zero(
        self,
        {found.embeddings},
        lambda {names}: {found.given.text},
        data={_quoted(tuple(found.given.data))},
        towers={_quoted(found.towers)},
        outputs={_quoted(found.outputs)},
{layout}{also}    )
"""


def _quoted(names: tuple[str, ...]) -> str:
    return tuple_of([f'"{each}"' for each in names])

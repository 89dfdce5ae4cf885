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
from veomni_hook.patches.site import Code, Missed, Reason, Site, Status

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
            reason = Reason(f"forward calls {name}, which calls it", Code.OTHER_FORM)
            yield Site(OP, f"{owner.name}.{name}", Status.MISSED, reason=reason, lineno=hidden.lineno)
        target = f"{owner.name}.forward"
        sites: list[Site] = []
        known: list[Call] = []
        for call, around in calls(forward):
            try:
                if apart:
                    # Which of the places calls a tower last is not known then.
                    raise Missed(f"{apart[0][0]} may call its tower, too", apart[0][1], Code.OTHER_FORM)
                known.append(read(view, owner, forward, call, around))
            except Missed as reason:
                sites.append(_missed(target, call, reason))
        sites += [_site(view, target, forward, call, known) for call in known]
        yield from sorted(sites, key=lambda site: site.lineno)


def _missed(target: str, call: ast.Call, error: Missed | ValueError) -> Site:
    reason = error.reason if isinstance(error, Missed) else Reason(str(error))
    return Site(OP, target, Status.MISSED, reason=reason, lineno=call.lineno)


def _site(view: ModuleView, target: str, forward: FunctionNode, found: Call, every: Sequence[Call]) -> Site:
    code = _code(found, elsewhere(forward, found, every))
    try:
        edits = before_statement(
            view, forward, found.statement, code, f"{own_attribute(found.node.func)} without data"
        )
    except ValueError as reason:
        return _missed(target, found.node, reason)
    captures = {"data": ", ".join(found.given.data.values()), "towers": ", ".join(found.towers)}
    return Site.calling(OP, target, found.given.form, found.node, edits, _IMPORT, captures=captures)


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

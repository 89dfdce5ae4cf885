"""Where a forward has several calls of one tower: under which conditions another of them calls it.

    image site:  elsewhere=(pixel_values_videos is not None or given.get('video') is None,)
    video site:  elsewhere=(pixel_values is not None,)

DistributedDataParallel needs one call of a tower in a forward, and a second one may be an error. So of the
places that find no data the last one calls the tower, and none does where another place has data.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_names, parameter_names, read_names
from veomni_hook.patches.code.tree import blocks
from veomni_hook.patches.idioms.absent_modality.read import Call, Condition, before_in

__all__ = ["elsewhere"]


def elsewhere(forward: FunctionNode, call: Call, every: Iterable[Call]) -> tuple[str, ...]:
    """Return the conditions, true where another place calls the towers of ``call`` in this forward.

    Args:
        forward: the method with the calls.
        call: one of them.
        every: all that are known, in text order.
    """
    block = next(each for each in blocks(forward) if call.statement in each)
    bound = parameter_names(forward) | bound_names(before_in(forward, call.statement))
    found = []
    for other in every:
        same = {*call.towers} <= {*other.towers} and {*call.outputs} == {*other.outputs}
        if other is call or not same or other.statement not in block or not other.condition.present:
            continue
        later = block.index(other.statement) > block.index(call.statement)
        condition = _calls(other.condition, later=later)
        if read_names(ast.parse(condition, mode="eval")) <= bound:
            found.append(condition)
    return tuple(found)


def _calls(asked: Condition, *, later: bool) -> str:
    """The condition under which a place calls the tower: with data, or, if it comes later, without, too."""
    called = asked.present
    if later:
        # With or without data: always, unless features are given.
        called = f"{called} or {' and '.join(asked.lookups)}" if asked.lookups else ""
        called = f"({called})" if called and asked.further else called
    return " and ".join(filter(None, (called, *asked.further))) or "True"

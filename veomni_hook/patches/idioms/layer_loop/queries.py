"""Attention whose queries are those of this process, and whose keys are those of all positions.

An indexer chooses from all keys, and a compressor pools windows of them. Both ask the cache for what is in
front of a position. So the cache that such attention gets answers with all positions
(`veomni_hook.parallel.whole_keys`); then everything else must work on each query by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import loaded, parameter_names
from veomni_hook.patches.code.tree import calls_in, chain, own_attribute
from veomni_hook.patches.idioms.layer_loop.values import (
    END,
    KEYS,
    NOTHING,
    PLAIN,
    Arguments,
    Items,
    Many,
    Tensor,
    Value,
    Whole,
    bare,
    is_shaped,
    shaped,
)
from veomni_hook.patches.routes.cache_parameter import cache_parameters
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed
from veomni_hook.patches.upstream_names import KEPT, names

__all__ = ["ATTRIBUTES", "INTERFACE", "Queries", "asks_interface", "of_keys", "queries_of"]

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
#: A mask of queries and keys, or of padding: its shape in one process is that of all positions.
_MASKS = ("B . S .", "B S")
_POSITIONS = "B S"
_RESULTS: dict[str, Value] = {
    "update": Items((PLAIN, PLAIN)),
    "store_compression_weights": Items((PLAIN, PLAIN, PLAIN)),
    "update_overlap_state": Items((NOTHING, NOTHING)),
    "get_seq_length": END,
}
#: Methods that get nothing of this process's positions.
_OF_ALL = ("update_compressor_states", "update_overlap_state", "get_seq_length")


@dataclass(frozen=True)
class Queries:
    """What a method of attention gets in place of its own arguments, by the names of its parameters.

    Attributes:
        cache: the cache.
        mask: the mask.
        positions: the positions, or the keyword arguments that hold them; empty if it gets none.
    """

    cache: str
    mask: str
    positions: str = ""


def asks_interface(function: FunctionNode) -> bool:
    """Whether a method asks for the user's implementation of attention."""
    return any(chain(call.func) == f"{INTERFACE}.get_interface" for call in calls_in(function))


def queries_of(
    view: ModuleView, function: FunctionNode, values: dict[str, Value]
) -> Iterator[tuple[Queries, dict[str, Value]]]:
    """What attention may get so that its queries are a part of the positions: all that is to be tried.

    Nothing, unless it hands its cache on to a module of its own, which chooses or makes keys.
    """
    own = parameter_names(function)
    masks, positions = own.intersection(names("mask")), sorted(own.intersection(names("positions")))
    bag = function.args.kwarg.arg if function.args.kwarg is not None else ""
    calls = [call for call in calls_in(function) if own_attribute(call.func)]
    handed_on = {*loaded([part for call in calls for part in (*call.args, *call.keywords)])}
    caches = [name for name in cache_parameters(view, function) if name in handed_on]
    for cache, mask, form in product(caches, sorted(masks), _MASKS):
        if isinstance(bare(values.get(mask, PLAIN)), Tensor):
            continue
        changed: dict[str, Value] = {cache: KEYS, mask: shaped(form)}
        if positions:
            changed[positions[0]] = shaped(_POSITIONS)
        elif isinstance(held := values.get(bag), Whole):
            parts = tuple((name, shaped(_POSITIONS)) for name in names("positions"))
            changed[bag] = Whole(held.name, (*held.held, *parts))
        yield Queries(cache, mask, positions[0] if positions else bag), {**values, **changed}


def of_keys(name: str, arguments: Arguments) -> Value:
    """What a method of the cache returns that answers with all positions: nothing of it is a part of them.

    Raises:
        Missed: it is another method, or another tensor.
    """
    passed = (*arguments.given, *arguments.named.values())
    rows = sum(is_shaped(value, "B S .", "B . S .") for value in arguments.given)
    parts = sum(isinstance(value, Tensor) for value in passed)
    if parts != rows or rows != KEPT.get(name, 0) or name not in (*KEPT, *_OF_ALL):
        raise Missed(f"it asks the cache for {name}", code=Code.MIXES_POSITIONS)
    return _RESULTS.get(name, PLAIN)


#: Attributes of the cache, or of what it holds of one layer.
ATTRIBUTES: dict[str, Value] = {"layers": Many(KEYS), **dict.fromkeys(("keys", "values"), PLAIN)}

"""What is known of a mask while dynamo traces: it is causal, or a causal window, and nothing else.

A traced mask has neither values nor a version. So the patched functions of transformers that create masks
note in dynamo's graph, at the node of the mask, what they have made. Attention reads the note, if the same
graph computes the mask and nothing in it can have written to it. A mask that is an input of the graph (in a
model whose layers are compiled one by one, or one of the user's) is unknown.

dynamo traces the functions of ``__all__``. They use no mask in the graph. So where all attention takes a
kernel that needs only the note, nothing in the graph uses the mask, and it is not computed.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from veomni_hook.kernels.shared.traced_frame import answered_while_tracing, number
from veomni_hook.kernels.shared.traced_graph import (
    is_exporting,
    is_only_read,
    is_same_length,
    names_of_calls,
    node_of,
    value_of,
)

__all__ = ["is_noted", "keys_seen", "note"]

_NOTE = "veomni_keys_seen"
#: What makes a new tensor, which nothing else can have.
_NEW = {operator.and_: "and_", torch.where: "where"}
_VIEWS = frozenset("contiguous detach expand getitem to unsqueeze view".split())
#: What only reads a mask: all that attention does with it.
_READERS = _VIEWS | frozenset("add logical_not ndim scaled_dot_product_attention size where".split())
_name = names_of_calls(_READERS)


def note(mask: object, window: int | None) -> None:
    """Note that ``mask`` shows each query the last ``window`` keys up to its own position; None: all of them.

    Call it where nothing else was combined into ``mask`` ``[batch, 1, queries, keys]``. With fewer queries
    than keys, if ``mask`` is no tensor, or in an exported program, nothing is noted.
    """
    _note()


def is_noted(mask: object) -> bool:
    """Return whether `note` was called for ``mask``."""
    return _is_noted()


def keys_seen(mask: torch.Tensor, query: torch.Tensor) -> int | None:
    """Return how many keys each query sees at most under ``mask``, or None if that is not known.

    0: all keys up to its own position. ``query`` is ``[batch, heads, queries, head_dim]``, and there are as
    many keys.
    """
    return _keys_seen()


@answered_while_tracing
def _note() -> None:
    mask = node_of("mask")
    if mask is None or is_exporting():
        return
    shape = value_of(mask).shape
    if len(shape) == 4 and is_same_length(shape[-2], shape[-1]):
        mask.meta[_NOTE] = number("window") or 0


@answered_while_tracing
def _is_noted() -> bool:
    mask = node_of("mask")
    return mask is not None and _NOTE in mask.meta


@answered_while_tracing
def _keys_seen() -> int | None:
    mask, query = node_of("mask"), node_of("query")
    if mask is None or query is None or _NOTE not in mask.meta:
        return None
    if not is_same_length(value_of(mask).shape[-2], value_of(query).shape[-2]):
        return None
    source = mask
    while _name(source) in _VIEWS and isinstance(before := source.args[0], Node):
        source = before
    if source.target not in _NEW:
        return None
    if not is_only_read(source, _name, _READERS, is_view=lambda node: _name(node) in _VIEWS):
        return None
    keys: int = mask.meta[_NOTE]
    return keys

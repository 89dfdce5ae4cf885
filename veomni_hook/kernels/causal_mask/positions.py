"""How position ids were made, read from the graph that dynamo has traced so far.

Ids that a model makes itself, because its caller gave none, are an ``arange`` plus integers: each row is one
sequence, whatever its length. Ids that come from outside may be packed, and their values are unknown while
tracing. So is everything that uses an operation that is not listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from veomni_hook.kernels.shared.traced_graph import is_only_read, is_same_length, names_of_calls, value_of

__all__ = ["counts_up"]

_IDS = (torch.int64, torch.int32)
_INTEGERS = (int, torch.SymInt)


def counts_up(node: Node) -> bool:
    """Return whether every row of the ids that a node computes is known to increase by one.

    Args:
        node: a node of the graph that dynamo is building; its last dimension is the row.
    """
    source = _source(node)
    # A view of ids has ids.
    return source is not None and is_only_read(
        source, _name, _READERS, is_view=lambda node: _shape(node) is not None
    )


def _source(node: Node) -> Node | None:
    """Return the ``arange`` that a node shifts by integers and reshapes by rows; None if it does more."""
    while (name := _name(node)) != "arange":
        step = _STEPS.get(name)
        before = next((one for one in node.args if isinstance(one, Node) and _shape(one) is not None), None)
        if step is None or before is None or not _shape(node) or not step(node, before):
            return None
        node = before
    return node if _shape(node) and _is_consecutive(node) else None


def _shape(node: Node) -> tuple[Any, ...] | None:
    """Return the shape of ids; None for anything else."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) and value.dtype in _IDS else None


def _is_integer(argument: object) -> bool:
    value = value_of(argument) if isinstance(argument, Node) else argument
    return isinstance(value, _INTEGERS) and not isinstance(value, bool)


def _is_consecutive(node: Node) -> bool:
    """Return whether an ``arange`` has integer bounds and the step one."""
    arguments = dict(zip(("start", "end", "step"), node.args, strict=False)) | node.kwargs
    bounds = [arguments[name] for name in ("start", "end") if name in arguments]
    whole = bool(bounds) and all(map(_is_integer, bounds))
    return whole and type(step := arguments.get("step", 1)) is int and step == 1 and "out" not in arguments


def _adds_integer(node: Node, before: Node) -> bool:
    first, *others = node.args
    return not node.kwargs and len(others) == 1 and _is_integer(others[0] if first is before else first)


def _subtracts_integer(node: Node, before: Node) -> bool:
    return node.args[0] is before and _adds_integer(node, before)


def _keeps_rows(node: Node, before: Node) -> bool:
    """Return whether the last dimension is the same for every input; adds no guard."""
    if node.args[0] is not before or not _shape(before):
        return False
    return is_same_length(*(_shape(node_)[-1] for node_ in (before, node)))  # type: ignore[index]


def _selects_rows(node: Node, before: Node) -> bool:
    """Return whether an index selects rows, or the same consecutive part of each."""
    if node.args[0] is not before:
        return False
    index: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    slices = [one for one in index if isinstance(one, slice)]
    integers = sum(map(_is_integer, index))
    ellipses = sum(one is Ellipsis for one in index)
    known = len(slices) + integers + ellipses + sum(one is None for one in index)
    if known != len(index) or not index or any(one.step not in (None, 1) for one in slices):
        return False
    if isinstance(index[-1], slice):
        return True
    # Otherwise the last dimension must be one that the index does not mention.
    rest = len(_shape(before) or ()) - len(slices) - integers
    return rest > 0 and (not ellipses or index[-1] is Ellipsis)


_SAME = "clone contiguous cuda detach expand int long repeat reshape to unsqueeze view".split()
#: What may be between an ``arange`` and the ids, with the condition.
_STEPS: dict[str, Callable[[Node, Node], bool]] = {
    "add": _adds_integer,
    "sub": _subtracts_integer,
    "getitem": _selects_rows,
    **dict.fromkeys(_SAME, _keeps_rows),
}
#: What only reads ids.
_READERS = frozenset(
    [*_STEPS, *"cumsum diff embedding eq float ge gt le lt max min mul ne size type_as".split()]
)
_name = names_of_calls(("arange", *_READERS))

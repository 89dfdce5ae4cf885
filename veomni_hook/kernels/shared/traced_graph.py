"""What the graph that dynamo is building tells of a tensor: how it was made, and who can have written to it.

All of this is private to torch, as `veomni_hook.kernels.shared.traced_frame`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.fx import Node, Proxy

from veomni_hook.kernels.shared.traced_frame import answered_while_tracing, traced, variable

__all__ = ["is_exporting", "is_only_read", "is_same_length", "names_of_calls", "node_of", "value_of"]


def node_of(name: str) -> Node | None:
    """Return the node that computes the tensor of a local name; None if there is none."""
    try:
        node = variable(name).as_proxy().node
    except (AttributeError, NotImplementedError):
        return None
    return node if isinstance(node, Node) and isinstance(value_of(node), torch.Tensor) else None


def value_of(node: Node) -> Any:
    """Return what a node computes, as far as it is known: tensors are fake."""
    return node.meta.get("example_value")


def is_same_length(one: object, other: object) -> bool:
    """Return whether two lengths are the same for every input; adds no guard."""
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return isinstance(one, int) and isinstance(other, int) and one == other


def names_of_calls(names: Iterable[str]) -> Callable[[Node], str]:
    """Return what names the tensor's method, or the function among ``names``, that a node calls; else ""."""
    functions: dict[Any, str] = {
        function: name
        for home in (operator, torch, torch.nn.functional)
        for name in names
        if callable(function := getattr(home, name, None))
    }

    def name(node: Node) -> str:
        return str(node.target) if node.op == "call_method" else functions.get(node.target, "")

    return name


@answered_while_tracing
def is_exporting() -> bool:
    """Return whether the program being traced is exported, or is not known to be compiled."""
    # To dynamo, `torch.compiler.is_exporting()` is always true in torch 2.11, and 2.6 does not have it.
    return getattr(torch.compiler, "_is_exporting_flag", False) or bool(traced("output.export", default=True))


def is_only_read(
    source: Node, name: Callable[[Node], str], readers: Collection[str], *, is_view: Callable[[Node], bool]
) -> bool:
    """Return whether nothing traced so far can have written to a tensor, directly or through a view.

    Args:
        source: the node that made the tensor.
        name: returns the name of what a node calls.
        readers: names of what only reads; everything else may write.
        is_view: whether the result of a reader may share the tensor's memory.
    """
    inner = _inner_inputs()
    waiting, known = [source], {source}
    while waiting:
        node = waiting.pop()
        users = [*node.users]
        if any(name(user) not in readers or "out" in user.kwargs for user in users):
            return False
        same = {*inner.get(node, ()), *filter(is_view, users)} - known
        known |= same
        waiting += same
    return True


def _inner_inputs() -> dict[Node, list[Node]]:
    """Return the inputs of incomplete inner graphs, by the nodes of outer graphs that they stand for.

    A checkpointed layer has a graph of its own. Only when it is complete, the outer graph uses the tensor.
    """
    inputs: dict[Node, list[Node]] = {}
    tracer = traced("output.current_tracer", default=None)
    while tracer is not None:
        for outer, inner in tracer.lifted_freevars.items():
            if isinstance(outer, Proxy):
                inputs.setdefault(outer.node, []).append(inner.node)
        tracer = tracer.parent
    return inputs

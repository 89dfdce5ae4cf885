"""What attention computed in a checkpointed layer, kept for the layer's recomputation.

The products of attention grow with the square of the length, and what its backward needs of them is no more
than the layer's input. So operators of attention run once: their results are noted, and the recomputation
gets them. An operator is one of attention if its first operands are query, key and value. One that draws
random numbers runs again: what draws some behind it has to find the generator where it was.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` does the same for a whole layer, whose every
operator then passes Python twice, and what it keeps stays on the device. Here only the call of attention
is watched, and what is kept may go to the host (`offload`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from veomni_hook.kernels.shared.random_numbers import place_of
from veomni_hook.kernels.shared.repeated import decided
from veomni_hook.memory import checkpoint, parts
from veomni_hook.memory.heads import by_heads

__all__ = ["kept"]

Implementation = Callable[..., Any]

_OPERANDS = (("query", "key", "value"), ("q", "k", "v"))


def kept(implementation: Implementation) -> Implementation:
    """Return ``implementation`` of attention, whose results checkpoints keep; the same if none do."""
    return partial(_attend, implementation) if parts.in_force().checkpoint else implementation


def _attend(implementation: Implementation, module: torch.nn.Module, *operands: Any, **named: Any) -> Any:
    layer = checkpoint.current()
    if layer is None or is_dynamo_compiling() or not torch.is_grad_enabled():
        return implementation(module, *operands, **named)
    results = decided(_Results, lambda: _Results(layer))
    implementation = partial(by_heads, implementation) if parts.in_force().tiles else implementation
    if results.noted:
        with _Replayed(results):
            return implementation(module, *operands, **named)
    with _Recorded(results):
        computed = implementation(module, *operands, **named)
    # Here, not in the recomputation: gradients go through the graph of the forward.
    for tensor in tree_leaves(computed):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: layer.attended())  # type: ignore[no-untyped-call]
    return computed


class _Results:
    """The results of operators in one call of attention, in their order."""

    def __init__(self, layer: checkpoint.Kept) -> None:
        self.layer = layer
        self.noted: list[tuple[Any, Any]] = []


class _Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the results of attention."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_attention(func):
            return func(*args, **(kwargs or {}))
        before = place_of(args[0].device)
        computed = func(*args, **(kwargs or {}))
        kept = None
        if place_of(args[0].device) == before:
            self.results.layer.attend()
            pack = self.results.layer.pack
            kept = tree_map_only(torch.Tensor, lambda result: pack(result.detach()), computed)
        self.results.noted.append((func, kept))
        return computed


class _Replayed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the noted results, as long as the same operators ask."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results
        self.rest = iter(results.noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_attention(func):
            noted, kept = next(self.rest, (None, None))
            if noted is not func:
                self.rest = iter(())
            elif kept is not None:
                return tree_map(self.results.layer.unpack, kept)
        return func(*args, **(kwargs or {}))


@cache
def _is_attention(func: Any) -> bool:
    """Return whether the first operands of an operator are query, key and value."""
    schema = getattr(func, "_schema", None)
    return schema is not None and _names(schema.arguments) in _OPERANDS


def _names(arguments: Iterable[Any]) -> tuple[str, ...]:
    return tuple(argument.name for argument in arguments)[:3]

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

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from veomni_hook.kernels.shared.repeated import decided
from veomni_hook.memory import checkpoint, parts
from veomni_hook.memory.heads import by_heads
from veomni_hook.memory.offload import Kept
from veomni_hook.memory.tracker import operand_names

__all__ = ["kept"]

Implementation = Callable[..., Any]

#: The first operands of operators of attention.
_OPERANDS = (("query", "key", "value"), ("q", "k", "v"))


def kept(implementation: Implementation) -> Implementation:
    """Return ``implementation`` of attention, whose results checkpoints keep; the same if none do."""
    return partial(_attend, implementation) if parts.in_force().checkpoint else implementation


def _attend(implementation: Implementation, module: torch.nn.Module, *operands: Any, **named: Any) -> Any:
    layer = checkpoint.current()
    if layer is None or is_dynamo_compiling() or not torch.is_grad_enabled():
        return implementation(module, *operands, **named)
    results = decided(_Results, lambda: _Results(layer))
    first = not results.noted
    mode: _Recorded | _Replayed = _Recorded(results) if first else _Replayed(results)
    if parts.in_force().tiles:
        implementation = partial(by_heads, implementation, partial(_Joined.apply, mode))
    with mode:
        computed = implementation(module, *operands, **named)
    if isinstance(mode, _Recorded):
        results.keep()
        # Here, not in the recomputation: gradients go through the graph of the forward.
        for tensor in tree_leaves(computed):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: layer.attended())  # type: ignore[no-untyped-call]
    return computed


@dataclass(frozen=True)
class _Part:
    """A result that is a part of what was joined: which heads, and whether its axes 1 and 2 are swapped."""

    heads: slice
    swapped: bool

    def of(self, joined: torch.Tensor) -> torch.Tensor:
        """Return the part of ``joined``, ``[B, S, heads, D]``."""
        part = joined[:, :, self.heads]
        return part.transpose(1, 2) if self.swapped else part


@dataclass(eq=False)
class _Results:
    """The results of operators in one call of attention, in their order."""

    layer: Kept
    noted: list[tuple[Any, Any]] = field(default_factory=list)
    #: The results of some heads each, side by side, which are kept in their place.
    joined: Any = None

    def keep(self) -> None:
        """Let the layer keep the results."""
        pack = self.layer.pack
        self.joined = None if self.joined is None else pack(self.joined)
        self.noted = [(func, tree_map_only(torch.Tensor, pack, kept)) for func, kept in self.noted]


class _Joined(torch.autograd.Function):
    """Outputs of some heads each, ``[B, S, heads, D]``, side by side."""

    @staticmethod
    def forward(ctx: Any, mode: _Recorded | _Replayed, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.number = len(outputs)
        return mode.join(outputs)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *dy.chunk(ctx.number, 2)


class _Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the results of attention."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operand_names(func)[:3] not in _OPERANDS:
            return func(*args, **(kwargs or {}))
        before = _place_of(args[0].device)
        computed = func(*args, **(kwargs or {}))
        kept = None
        if _place_of(args[0].device) == before:
            self.results.layer.attend()
            kept = tree_map_only(torch.Tensor, torch.Tensor.detach, computed)
        self.results.noted.append((func, kept))
        return computed

    def join(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return ``outputs`` side by side; noted results that are one of them are kept as a part of it."""
        joined = torch.cat(outputs, 2)
        places: dict[Any, _Part] = {}
        start = 0
        for output in outputs:
            heads = slice(start, start := start + output.shape[2])
            places |= {
                _place(output): _Part(heads, False),
                _place(output.transpose(1, 2)): _Part(heads, True),
            }
        noted = [
            (func, tree_map_only(torch.Tensor, lambda tensor: places.get(_place(tensor), tensor), kept))
            for func, kept in self.results.noted
        ]
        if all(any(isinstance(leaf, _Part) for leaf in tree_leaves(kept)) for _, kept in noted):
            self.results.noted, self.results.joined = noted, joined.detach()
        return joined


class _Replayed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the noted results, as long as the same operators ask."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results
        self.rest = iter(results.noted)
        self.joined = results.layer.unpack(results.joined)
        self.left = len(results.noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operand_names(func)[:3] in _OPERANDS:
            noted, kept = next(self.rest, (None, None))
            if noted is not func:
                self.rest = iter(())
            elif kept is not None:
                self.left -= 1
                return tree_map(self._again, kept)
        return func(*args, **(kwargs or {}))

    def _again(self, kept: Any) -> Any:
        return kept.of(self.joined) if isinstance(kept, _Part) else self.results.layer.unpack(kept)

    def join(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return ``outputs`` side by side: what is kept, if they are parts of it."""
        whole = self.joined is not None and not self.left
        return self.joined.detach() if whole else torch.cat(outputs, 2)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where the elements of a tensor are."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _place_of(device: torch.device) -> Hashable:
    """Return where the random numbers of ``device`` are; nothing waits for the device."""
    if device.type == "cpu":
        return torch.default_generator.get_state().numpy().tobytes()
    home = torch.get_device_module(device)
    generator = home.default_generators[home.current_device() if device.index is None else device.index]
    return generator.initial_seed(), generator.get_offset()

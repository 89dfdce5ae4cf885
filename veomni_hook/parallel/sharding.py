"""How the sequences of a base model are split: the state between `shard` and `gather`.

A model's forward pass is split if and only if gradients are enabled. This is what makes recomputation right:
where a checkpoint runs a layer again, in a backward pass and outside of the model's forward, the layer
belongs to a pass that was split, because no other pass is recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn
from weakref import ref

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from veomni_hook.errors import ParallelError
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing
from veomni_hook.parallel import process
from veomni_hook.parallel.collectives import part_length
from veomni_hook.parallel.groups import SequenceGroup

if TYPE_CHECKING:
    from transformers import Cache

__all__ = ["Sharding", "in_force", "link", "refuse", "sharding_of"]

_ATTRIBUTE = "_veomni_sequence"


class Sharding:
    """How a base model's sequences are split; every module of the model holds it.

    Attributes:
        model: the class of the base model, for messages.
        owner: the base model (a weak reference).
        group: the processes that share its sequences.
        in_layers: whether the model is between `shard` and `gather`.
        full: the number of positions of the batch that entered the layers last.
        lengths: by the positions of one process: the numbers of positions of all batches so far.
        calls: how many calls of attention or rules there were since `shard`, those in compiled code left out.
        compiled: whether there was one in compiled code.
        cache: what the layers fill now.
        convolved: the module whose convolution has got the positions in front of this process's, and whose
            rule did not run yet.
    """

    def __init__(self, module: nn.Module, group: SequenceGroup) -> None:
        self.model = type(module).__name__
        self.owner = ref(module)
        self.group = group
        self.in_layers = False
        self.full = 0
        self.lengths: dict[int, set[int]] = {}
        self.calls = 0
        self.compiled = False
        self.cache: Cache | None = None
        self.convolved: object = None

    def __reduce__(self) -> tuple[object, ...]:
        # A model that is copied or saved leaves it behind: the copy gets its own with its first batch.
        return type(None), ()

    def enter(self, full: int, cache: Cache | None) -> None:
        """Note that a batch of ``full`` positions enters the layers, which fill ``cache``."""
        self.in_layers, self.full, self.cache = True, full, cache
        self.compiled = False
        if not is_dynamo_compiling():
            self.calls = 0
            self.lengths.setdefault(part_length(full, self.group), set()).add(full)

    def note_call(self) -> None:
        """Note a call of attention, or of a rule of linear attention."""
        if is_dynamo_compiling():
            self.compiled = True  # to count would make each number a graph of its own
        else:
            self.calls += 1

    def note_convolution(self, module: object) -> None:
        """Note that a module has convolved its positions with those in front of them."""
        if is_dynamo_compiling():
            self.compiled = True
        else:
            self.convolved = module

    def has_convolved(self, module: object) -> bool:
        """Return whether that was noted of ``module`` since its last rule, or may be in compiled code."""
        if is_dynamo_compiling() or self.compiled:
            return True
        convolved, self.convolved = self.convolved, None
        return convolved is module

    def leave(self) -> Cache | None:
        """Note that the batch has left the layers; return the cache that they have filled."""
        cache, self.in_layers, self.cache = self.cache, False, None
        return cache

    def known_lengths(self, part: int) -> set[int]:
        """Return how many positions a batch may have of which this process has ``part``.

        While a checkpoint recomputes a layer, it may be any batch so far.
        """
        return {self.full} if self.in_layers else self.lengths.get(part, set())

    def positions(self, part: int, told: int | None, *, causal: bool) -> int:
        """Return over how many positions attention runs for a batch of which this process has ``part``.

        ``told`` is the number in the operands of the call, if they tell one. Without it, causal attention
        runs over the copies at the end as well, which change nothing in front of them: so it has the same
        shapes when it is recomputed.

        Raises:
            ParallelError: a layer is recomputed, and batches of several lengths fit.
        """
        known = self.known_lengths(part)
        if told is not None and told in known:
            return told
        if told is None and causal and known:
            return part * self.group.size
        if len(known) == 1:
            return next(iter(known))
        raise ParallelError(
            f"while {self.model} recomputes a layer, it is unknown of which batch: {part} positions a "
            f"process fit batches of {sorted(known) or 'no'} positions",
            where=f"attention over sequences that {self.group.size} processes share",
            fix=f"pad every batch to a multiple of sp={self.group.size} positions",
        )


def sharding_of(module: nn.Module) -> Sharding | None:
    """Return how the sequences of the model that ``module`` belongs to are split; None: not at all so far."""
    sharding: Sharding | None = module.__dict__.get(_ATTRIBUTE)
    return sharding


def link(module: nn.Module, sharding: Sharding) -> None:
    """Let a base model and the modules in its layers know how its sequences are split.

    Layers are what its module lists hold. Others of its modules may have attention of their own, in front of
    the layers.
    """
    module.__dict__[_ATTRIBUTE] = sharding
    children = list(module.children())
    lists = [child for child in children if isinstance(child, nn.ModuleList | nn.ModuleDict)] or children
    for list_ in lists:
        for inner in list_.modules():
            inner.__dict__[_ATTRIBUTE] = sharding


def in_force(module: nn.Module) -> Sharding | None:
    """Return how the positions are split that ``module``, a part of a layer, gets in this call, or None."""
    sharding = None if process.sizes().sp == 1 else sharding_of(module)
    if sharding is None or not (sharding.in_layers or _in_backward()):
        return None
    return sharding


@answered_while_tracing
def _in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def refuse(module: nn.Module, reason: str, *, where: str = "", advice: str = "") -> NoReturn:
    """Raise because attention cannot run with the positions of one process.

    Args:
        module: attention.
        reason: why.
        where: the place; empty: the class of the module.
        advice: what to do, in front of the advice that always holds.
    """
    name = type(module).__name__
    raise ParallelError(
        f"{name} cannot run with sequences that {process.sizes().sp} processes share: {reason}",
        where=where or f"attention of {name}",
        fix=f"{advice}set VEOMNI_PARALLEL without sp (docs/parallel.md lists what is supported)",
    )

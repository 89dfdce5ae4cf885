"""Sequence parallelism in a base model: each process has its own positions in the layers, and only there.

Patched models call `shard` in front of their layers and `gather` behind them. Everything else of a model sees
whole sequences: the embedding, masks, positions, rotary tables, the head and the loss.

A model's forward pass is split if and only if gradients are enabled. This is what makes recomputation right:
where a checkpoint runs a layer again, in the backward pass and outside of the model's forward, gradients are
enabled; and a pass that was not split is never recomputed.
"""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import ref

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from veomni_hook.errors import ParallelError
from veomni_hook.parallel import process
from veomni_hook.parallel.agreement import check_same_batch
from veomni_hook.parallel.captured import check_captured, gather_captured
from veomni_hook.parallel.collectives import gathered, own_part, part_length
from veomni_hook.parallel.groups import SequenceGroup, sequence_group

__all__ = ["Sharding", "gather", "refused", "shard", "sharding_of"]

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
        calls: how many attention calls there were since `shard`.
    """

    def __init__(self, module: nn.Module, group: SequenceGroup) -> None:
        self.model = type(module).__name__
        self.owner = ref(module)
        self.group = group
        self.in_layers = False
        self.full = 0
        self.lengths: dict[int, set[int]] = {}
        self.calls = 0

    def __reduce__(self) -> tuple[object, ...]:
        # A model that is copied or saved leaves it behind: the copy gets its own with its first batch.
        return type(None), ()

    def enter(self, full: int) -> None:
        """Note that a batch of ``full`` positions enters the layers."""
        self.in_layers, self.full = True, full
        if not is_dynamo_compiling():
            self.calls = 0
            self.lengths.setdefault(part_length(full, self.group), set()).add(full)

    def full_length(self, part: int, mask: Any, *, causal: bool) -> int:
        """Return how many positions the batch has of which this process has ``part``.

        While a checkpoint recomputes a layer, nobody but the mask tells which batch it is. Without a mask,
        causal attention needs no exact number: positions at the end change nothing in front of them.

        Raises:
            ParallelError: several batches fit, and the attention is not causal.
        """
        if self.in_layers:
            return self.full
        known = self.lengths.get(part, {part * self.group.size})
        if len(known) == 1:
            return next(iter(known))
        if mask is not None and mask.shape[-1] in known:
            return int(mask.shape[-1])
        if mask is None and causal:
            return part * self.group.size
        raise ParallelError(
            f"while {self.model} recomputes a layer, batches of several lengths fit: {sorted(known)}",
            where=f"attention over sequences that {self.group.size} processes share",
            fix=f"pad every batch to a multiple of sp={self.group.size} positions",
        )


def shard(module: nn.Module, hidden_states: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """Return this process's positions of what enters the layers of ``module``, or the very same objects.

    Args:
        module: the base model.
        hidden_states: ``[batch, positions, hidden]``.
        others: tensors ``[..., positions, width]``, or tuples, lists or dicts of such; or None.

    Raises:
        ParallelError: the processes cannot share this batch; the message says why.
    """
    sharding = sharding_of(module)
    if process.sizes().sp == 1 or not torch.is_grad_enabled():
        if sharding is not None:
            sharding.in_layers = False
        return (hidden_states, *others)
    if sharding is None or not is_dynamo_compiling():
        sharding = _linked(module, sharding)
    check_captured(type(module).__name__)
    group, length = sharding.group, hidden_states.shape[1]
    if not sharding.lengths and not is_dynamo_compiling():
        check_same_batch(type(module).__name__, hidden_states, group)
    sharding.enter(length)
    parts = (_part(each, length, group) for each in others)
    return (own_part(hidden_states, 1, group), *parts)


def gather(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return all positions of what leaves the layers of ``module``; the same object if it is not split.

    Raises:
        ParallelError: a layer has not seen the whole sequence.
    """
    sharding = sharding_of(module)
    if sharding is None or not sharding.in_layers:
        return hidden_states
    sharding.in_layers = False
    if not is_dynamo_compiling():
        _check_calls(module, sharding)
    gather_captured(sharding.full, sharding.group)
    return gathered(hidden_states, 1, sharding.full, sharding.group)


def refused(module: nn.Module, reason: str) -> None:
    """Raise if this pass of ``module`` would have to be split, which ``reason`` forbids.

    Raises:
        ParallelError: the setting has ``sp`` above 1, and gradients are enabled.
    """
    size = process.sizes().sp
    if size > 1 and torch.is_grad_enabled():
        _refuse(type(module).__name__, size, reason)


def sharding_of(module: nn.Module) -> Sharding | None:
    """Return how the sequences of the model that ``module`` belongs to are split; None: not at all so far."""
    found: Sharding | None = module.__dict__.get(_ATTRIBUTE)
    return found


def _linked(module: nn.Module, sharding: Sharding | None) -> Sharding:
    """Return the sharding of a base model, known to each of its modules (layers may be new)."""
    group = sequence_group()
    own = sharding is not None and sharding.owner() is module
    if sharding is not None and sharding.in_layers and not own:
        name, outer = type(module).__name__, sharding.model
        _refuse(name, group.size, f"it runs inside the layers of {outer}, which are split already")
    if sharding is None or not own or sharding.group != group:
        sharding = Sharding(module, group)
    for each in module.modules():
        each.__dict__[_ATTRIBUTE] = sharding
    return sharding


def _part(value: Any, length: int, group: SequenceGroup) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() >= 2 and value.shape[-2] == length:
            return own_part(value, -2, group)
        if value.dim() < 2 or value.shape[-2] != 1:
            raise ParallelError(
                f"a tensor {list(value.shape)} enters the layers beside hidden states of {length} positions",
                where="the layers of a model whose sequences are shared",
                fix="report this model; set VEOMNI_PARALLEL without sp until it is supported",
            )
        return value
    if isinstance(value, dict):
        return {key: _part(each, length, group) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_part(each, length, group) for each in value])
    return value


def _check_calls(module: nn.Module, sharding: Sharding) -> None:
    """Raise if fewer attention calls than layers have exchanged positions: the others saw a part only."""
    layers = getattr(module, "layers", None)
    count = len(layers) if isinstance(layers, nn.ModuleList) else 1
    if sharding.calls < count:
        _refuse(
            sharding.model,
            sharding.group.size,
            f"only {sharding.calls} of its {count} layers went through transformers' attention interface; "
            "the others saw a part of the sequence alone",
        )


def _refuse(name: str, size: int, reason: str) -> NoReturn:
    raise ParallelError(
        f"{name} cannot be split over sp={size} processes: {reason}",
        where=f"{name}.forward",
        fix="set VEOMNI_PARALLEL without sp for this model (docs/parallel.md lists what is supported)",
    )

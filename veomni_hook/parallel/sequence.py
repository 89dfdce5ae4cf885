"""Sequence parallelism in a base model: each process has its own positions in the layers, and only there.

Patched models call `shard` in front of their layers and `gather` behind them. Everything else of a model sees
whole sequences: the embedding, masks, positions, rotary tables, the head and the loss.

A model's forward pass is split if and only if gradients are enabled (`veomni_hook.parallel.sharding` says
why): evaluation and generation are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor

from veomni_hook.errors import ParallelError
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing, variable
from veomni_hook.parallel import linear_attention, loss, process
from veomni_hook.parallel.agreement import check_same_batch
from veomni_hook.parallel.captured import check_captured, gather_captured
from veomni_hook.parallel.collectives import gathered, own_part
from veomni_hook.parallel.groups import SequenceGroup, sequence_group
from veomni_hook.parallel.sharding import Sharding, in_force, link, sharding_of

__all__ = ["absent", "added", "gather", "part_of_rows", "refused", "refused_inside", "rows_to_add", "shard"]

#: What torch, transformers and accelerate call this dimension of a mesh.
_TENSOR_PARALLEL = "tp"
#: What layers and users ask of caches.
_OF_CACHES = (
    *("update", "get_seq_length", "update_conv_state", "update_recurrent_state"),
    *("get_conv_state", "get_recurrent_state", "has_previous_state"),
)


def shard(
    module: nn.Module, hidden_states: torch.Tensor, *others: object, cache: object = None
) -> tuple[object, ...]:
    """Return this process's positions of what enters the layers of ``module``, or the very same objects.

    Args:
        module: the base model.
        hidden_states: ``[batch, positions, hidden]``.
        others: tensors ``[..., positions, width]``, or tuples, lists or dicts of such; or None.
        cache: the cache of keys and values that the layers fill, or None. Nobody can use it afterwards: it
            has this process's positions only.

    Raises:
        ParallelError: the processes cannot share this batch; the message says why.
    """
    if is_dynamo_compiling():
        _linked_while_tracing()
    sharding = sharding_of(module)
    if process.sizes().sp == 1 or not torch.is_grad_enabled():
        if sharding is not None:
            sharding.in_layers = False
        return (hidden_states, *others)
    if sharding is None or not is_dynamo_compiling():
        sharding = _linked(module, sharding)
    check_captured(type(module).__name__)
    group, length = sharding.group, hidden_states.shape[1]
    if not is_dynamo_compiling():
        check_same_batch(module, hidden_states, group, first=not sharding.lengths)
        length_of: Any = getattr(cache, "get_seq_length", None)
        if length_of is not None and length_of() > 0:
            _refuse(module, "its cache holds keys already (generate without gradients)")
    sharding.enter(length, cache)
    parts = (_part(other, length, group) for other in others)
    return (own_part(hidden_states, 1, group), *parts)


def gather(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return all positions of what leaves the layers of ``module``; the same object if it is not split.

    Raises:
        ParallelError: a layer has not seen the whole sequence.
    """
    sharding = sharding_of(module)
    if sharding is None or not sharding.in_layers:
        return hidden_states
    cache = sharding.leave()
    if not is_dynamo_compiling():
        _check_calls(module, sharding)
        if cache is not None:
            for name in _OF_CACHES:
                setattr(cache, name, _unusable)
    gather_captured(sharding.full, sharding.group)
    whole = gathered(hidden_states, 1, sharding.full, sharding.group)
    if not is_dynamo_compiling():
        loss.note_part(module, whole, hidden_states, sharding.group)
    return whole


def part_of_rows(module: nn.Module, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return this process's positions of a mask of padding ``[rows, positions]``, for a part of a layer.

    The same object if the layers of ``module`` are not split, or if it is None.

    Raises:
        ParallelError: it is no such mask.
    """
    sharding = in_force(module)
    if sharding is None or mask is None:
        return mask
    if mask.dim() != 2:
        _refuse(module, f"its mask is {list(mask.shape)}, not [rows, positions]")
    return own_part(mask, 1, sharding.group)


@dataclass
class _Added:
    """What is added to the hidden states of this process's positions behind a layer."""

    positions: torch.Tensor


def rows_to_add(
    module: nn.Module,
    method: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None,
    rows: Sequence[torch.Tensor] | None,
) -> object:
    """Return what `added` takes in place of ``rows``: the same object if the layers are not split.

    Args:
        module: the base model, between `shard` and `gather`.
        method: its method that adds rows to hidden states at a mask.
        hidden_states: ``[batch, part of the positions, hidden]``.
        mask: ``[batch, positions]``, true for the rows.
        rows: for each layer ``[true positions of mask, hidden]``; or None.

    Raises:
        ParallelError: the mask is not of all positions.
    """
    sharding = sharding_of(module)
    if rows is None or sharding is None or not sharding.in_layers:
        return rows
    expected = [hidden_states.shape[0], sharding.full]
    if mask is None or list(mask.shape) != expected:
        shape = None if mask is None else list(mask.shape)
        _refuse(
            module,
            f"the mask of the rows that are added between its layers is {shape}, not {expected}",
        )
    zeros = hidden_states.new_zeros(*expected, hidden_states.shape[-1])
    return [_Added(own_part(method(zeros, mask, row), 1, sharding.group)) for row in rows]


def added(
    method: Callable[..., torch.Tensor], hidden_states: torch.Tensor, mask: torch.Tensor | None, rows: object
) -> torch.Tensor:
    """Return ``method(hidden_states, mask, rows)``, or for rows of `rows_to_add` the sum with them."""
    if isinstance(rows, _Added):
        return hidden_states + rows.positions
    return method(hidden_states, mask, rows)


def refused(module: nn.Module, reason: str) -> None:
    """Raise if this pass of ``module`` would have to be split, which ``reason`` forbids.

    Raises:
        ParallelError: the setting has ``sp`` above 1, and gradients are enabled.
    """
    if process.sizes().sp > 1 and torch.is_grad_enabled():
        _refuse(module, reason)


def absent(module: nn.Module, output: object, reason: str) -> None:
    """Raise like `refused` if ``module`` gets another model's output."""
    if output is not None:
        refused(module, reason)


def refused_inside(module: nn.Module, reason: str) -> None:
    """Raise if ``module``, a part of a layer, has a part of the positions, for this reason.

    Raises:
        ParallelError: its layers are split.
    """
    if in_force(module) is not None:
        _refuse(module, reason)


def _linked(module: nn.Module, sharding: Sharding | None) -> Sharding:
    """Return the sharding of a base model, known to each of its modules (layers may be new)."""
    group = sequence_group()
    own = sharding is not None and sharding.owner() is module
    if sharding is not None and sharding.in_layers and not own:
        _refuse(module, f"it runs inside the layers of {sharding.model}, which are split already")
    if sharding is None or not own or sharding.group != group:
        for name, parameter in module.named_parameters():
            axes = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
            if _TENSOR_PARALLEL in axes:  # whose processes need the same positions
                _refuse(module, f"tensor parallelism divides {name}")
        sharding = Sharding(module, group)
    link(module, sharding)
    loss.attach()
    linear_attention.attach()
    return sharding


@answered_while_tracing
def _linked_while_tracing() -> bool:
    """Link the module of the frame that dynamo traces: what is done here cannot be traced."""
    module = getattr(variable("module"), "value", None)
    if isinstance(module, nn.Module) and process.sizes().sp > 1 and torch.is_grad_enabled():
        _linked(module, sharding_of(module))
    return True


def _part(value: object, length: int, group: SequenceGroup) -> Any:
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
        return {key: _part(item, length, group) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_part(item, length, group) for item in value])
    return value


def _unusable(*_: object, **__: object) -> NoReturn:
    raise ParallelError(
        "this cache was filled in a pass with gradients, so each process has the keys of its positions only",
        where="a cache of keys and values, with sequences that several processes share",
        fix="fill caches under torch.no_grad(), or pass use_cache=False in training",
    )


def _check_calls(module: nn.Module, sharding: Sharding) -> None:
    """Raise if fewer attention calls than layers have exchanged positions: the others saw a part only."""
    layers = getattr(module, "layers", None)
    count = len(layers) if isinstance(layers, nn.ModuleList) else 1
    if sharding.calls < count and not sharding.compiled:
        _refuse(
            module,
            f"only {sharding.calls} of its {count} layers went through transformers' attention interface, or "
            "a rule of linear attention that is routed; the others saw a part of the sequence alone",
        )


def _refuse(module: nn.Module, reason: str) -> NoReturn:
    name = type(module).__name__
    raise ParallelError(
        f"{name} cannot be split over sp={process.sizes().sp} processes: {reason}",
        where=f"{name}.forward",
        fix="set VEOMNI_PARALLEL without sp for this model (docs/parallel.md lists what is supported)",
    )

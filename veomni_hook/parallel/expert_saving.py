"""Checkpoints of models whose experts are divided: whole weights, and optimizers on any mesh.

An optimizer is saved with `torch.distributed.checkpoint`, by the names of parameters, so it loads on another
mesh; the files are those of transformers' ``save_optimizer_distributed``. Or it is saved whole, as one
process saves it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.serialization import skip_data
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from veomni_hook.errors import ParallelError

__all__ = [
    "Groups",
    "arranged",
    "load_optimizer",
    "load_whole_optimizer",
    "save_optimizer",
    "save_pretrained",
    "save_whole_optimizer",
    "whole_state",
]

Groups: TypeAlias = Sequence[Sequence[Tensor]]

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
_KEY = "optimizer"
#: What an optimizer's `state_dict` has for each parameter.
_STATES = "state"


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights of a sharded model on rank 0's host, nothing elsewhere. All ranks call."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,  # noqa: FBT001, FBT002 - transformers' signature
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """`PreTrainedModel.save_pretrained` of a model that `expert_division` has sharded: rank 0 writes.

    All ranks must call, unless the state is given.
    """
    if options.get("distributed_checkpoint"):
        raise ParallelError(
            "save_pretrained(distributed_checkpoint=True) needs transformers 5.23 where experts are divided",
            where=f"{type(model).__name__}.save_pretrained",
            fix="leave distributed_checkpoint out: rank 0 writes the whole weights",
        )
    state = whole_state(model) if state_dict is None else state_dict
    if distributed.get_rank() == 0 and is_main_process:
        type(model).save_pretrained(model, save_directory, state_dict=state, **options)
    if state_dict is None:
        distributed.barrier()


def save_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]
) -> None:
    """Save the state of a sharded model's optimizer; `load_optimizer` reads it on any mesh. All call."""
    state = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    save({_KEY: tree_map_only(DTensor, _in_one_piece, state)}, checkpoint_id=folder)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]
) -> None:
    """Load what `save_optimizer` saved, into an optimizer of the same parameters. All ranks must call."""
    own = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    read = tree_map_only(DTensor, _in_one_piece, own)
    load({_KEY: read}, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, tree_map(_placed_as, read, own), options=_BY_NAME)


def save_whole_optimizer(
    optimizer: torch.optim.Optimizer, groups: Groups, file: str | os.PathLike[str]
) -> None:
    """Write into ``file`` what one process saves as the optimizer's ``state_dict``. All ranks must call.

    Rank 0 writes. A rank has one whole tensor at a time: the file is laid out first, and then filled.

    Args:
        optimizer: of a sharded model.
        groups: the groups that one process has; see `arranged`.
        file: the new file.
    """
    own = optimizer.state_dict()
    state: dict[str, Any] = {_STATES: {}, "param_groups": []}
    for parts, numbers in arranged(optimizer, own, groups):
        first = len(state[_STATES])
        last = first + len(numbers)
        state[_STATES] |= {first + place: own[_STATES].get(each, {}) for place, each in enumerate(numbers)}
        state["param_groups"].append({**parts[0], "params": [*range(first, last)]})
    state[_STATES] = {number: values for number, values in state[_STATES].items() if values}
    is_writer = distributed.get_rank() == 0
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    places = _laid_out(state, file) if is_writer else [0] * len(tensors)
    with open(file, "r+b") if is_writer else nullcontext() as stream:
        for tensor, place in zip(tensors, places, strict=True):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if stream is not None:
                stream.seek(place)
                stream.write(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _laid_out(state: object, file: str | os.PathLike[str]) -> list[int]:
    """Save ``state`` without the data of its tensors; return where those belong."""
    with FakeTensorMode():
        empty = tree_map_only(Tensor, lambda value: torch.empty(value.shape, dtype=value.dtype), state)
        with skip_data(materialize_fake_tensors=True):
            torch.save(empty, file)
        leaves = tree_leaves(torch.load(file, weights_only=True))
    offsets = (leaf.untyped_storage()._checkpoint_offset for leaf in leaves if isinstance(leaf, Tensor))
    return [offset for offset in offsets if offset is not None]


def load_whole_optimizer(optimizer: torch.optim.Optimizer, groups: Groups, state: Mapping[str, Any]) -> None:
    """Load what `save_whole_optimizer`, or one process, saved; no rank waits for another.

    Raises:
        ParallelError: ``state`` is of other groups, or of other parameters.
    """
    own = optimizer.state_dict()
    parameters = _numbered(own, optimizer)
    whole = arranged(optimizer, own, groups)
    if len(whole) != len(state["param_groups"]):
        raise _other(optimizer)
    for (parts, numbers), group in zip(whole, state["param_groups"], strict=True):
        for part in parts:
            part.update({key: value for key, value in group.items() if key != "params"})
        saved = [state[_STATES].get(number, {}) for number in group["params"]]
        members = [parameters[number] for number in numbers]
        if len(members) != len(saved) or any(not _fits(*pair) for pair in zip(members, saved, strict=True)):
            raise _other(optimizer)
        own[_STATES] |= {
            number: {key: _divided_as(value, parameters[number]) for key, value in values.items()}
            for number, values in zip(numbers, saved, strict=True)
        }
    optimizer.load_state_dict(own)


def arranged(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], groups: Groups
) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Return the groups of ``state``, of an optimizer, that divide each of ``groups``; and its numbers there.

    Args:
        optimizer: has one or several groups in a row for each of ``groups``.
        state: its ``state_dict``.
        groups: lists of parameters; the order of a list is that of the numbers.
    """
    numbers = {id(parameter): number for number, parameter in _numbered(state, optimizer).items()}
    own = iter(state["param_groups"])
    found = []
    for group in groups:
        parts = [next(own)]
        while sum(len(part["params"]) for part in parts) < len(group):
            parts.append(next(own))
        found.append((parts, [numbers[id(parameter)] for parameter in group]))
    return found


def _numbered(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Return an optimizer's parameters by the numbers in its ``state_dict``."""
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return {
        number: parameter
        for theirs, own in pairs
        for number, parameter in zip(theirs["params"], own["params"], strict=True)
    }


def _other(optimizer: torch.optim.Optimizer) -> ParallelError:
    return ParallelError(
        "the optimizer of the checkpoint has other groups or parameters than the one that trains",
        where=type(optimizer).__name__,
        fix="make the optimizer as in the run that saved it, or train on from the weights alone",
    )


def _fits(parameter: Tensor, values: dict[str, Any]) -> bool:
    """Return whether states are numbers or have the shape of the parameter."""
    shapes = [value.shape for value in values.values() if isinstance(value, Tensor) and value.ndim]
    return all(shape == parameter.shape for shape in shapes)


def _divided_as(value: Any, parameter: Tensor) -> Any:
    """Return a whole tensor as a rank's part of it, if ``parameter`` is one."""
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    mesh = parameter.device_mesh
    value = value.to(parameter.device)
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim).redistribute(
        placements=parameter.placements
    )


def _in_one_piece(value: DTensor) -> DTensor:
    """Return a tensor of which each rank has one block: the form that checkpoints describe.

    Experts that several ranks divide further lie in several blocks.
    """
    return value.redistribute(
        placements=[Shard(each.dim) if isinstance(each, _StridedShard) else each for each in value.placements]
    )


def _placed_as(value: object, own: object) -> object:
    return value.redistribute(placements=own.placements) if isinstance(own, DTensor) else value  # type: ignore[attr-defined]

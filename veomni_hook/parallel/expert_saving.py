"""Checkpoints of models whose experts are divided: whole weights, and optimizers on any mesh.

An optimizer is saved with `torch.distributed.checkpoint`, by the names of parameters, so it loads on another
mesh; the files are those of transformers' ``save_optimizer_distributed``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, distributed, nn
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
from torch.utils._pytree import tree_map

from veomni_hook.errors import ParallelError

__all__ = ["load_optimizer", "load_whole_optimizer", "save_optimizer", "save_pretrained", "whole_state"]

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
_KEY = "optimizer"


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
    save({_KEY: tree_map(_in_one_piece, state)}, checkpoint_id=folder)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]
) -> None:
    """Load what `save_optimizer` saved, into an optimizer of the same parameters. All ranks must call."""
    own = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    read = tree_map(_in_one_piece, own)
    load({_KEY: read}, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, tree_map(_placed_as, read, own), options=_BY_NAME)


def load_whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the ``state_dict`` of an optimizer whose model was whole; no rank waits for another.

    A group of ``state`` is one of ``optimizer``, or several in a row that divide it by meshes. Its parameters
    have the order that they have in the model.

    Raises:
        ParallelError: ``state`` is of other groups, or of other parameters.
    """
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    own = optimizer.state_dict()
    groups = iter(zip(own["param_groups"], optimizer.param_groups, strict=True))
    for group in state["param_groups"]:
        members: list[tuple[int, Tensor]] = []
        while len(members) < len(group["params"]) and (pair := next(groups, None)) is not None:
            members += zip(pair[0]["params"], pair[1]["params"], strict=True)
            pair[0].update({key: value for key, value in group.items() if key != "params"})
        members.sort(key=lambda member: places[id(member[1])])
        saved = [state["state"].get(number, {}) for number in group["params"]]
        if len(members) != len(saved) or any(not _fits(*pair) for pair in zip(members, saved, strict=True)):
            raise _other(model)
        own["state"] |= {
            number: {key: _divided_as(value, parameter) for key, value in values.items()}
            for (number, parameter), values in zip(members, saved, strict=True)
        }
    if next(groups, None) is not None:
        raise _other(model)
    optimizer.load_state_dict(own)


def _other(model: nn.Module) -> ParallelError:
    return ParallelError(
        "the optimizer of the checkpoint has other groups or parameters than the one that trains",
        where=f"{type(model).__name__}'s optimizer",
        fix="make the optimizer as in the run that saved it, or train on from the weights alone",
    )


def _fits(member: tuple[int, Tensor], values: dict[str, Any]) -> bool:
    """Return whether states are numbers or have the shape of the parameter."""
    shapes = [value.shape for value in values.values() if isinstance(value, Tensor) and value.ndim]
    return all(shape == member[1].shape for shape in shapes)


def _divided_as(value: Any, parameter: Tensor) -> Any:
    """Return a whole tensor as a rank's part of it, if ``parameter`` is one."""
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    mesh = parameter.device_mesh
    value = value.to(parameter.device)
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim).redistribute(
        placements=parameter.placements
    )


def _in_one_piece(value: object) -> object:
    """Return a tensor of which each rank has one block: the form that checkpoints describe.

    Experts that several ranks divide further lie in several blocks.
    """
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(
        placements=[Shard(each.dim) if isinstance(each, _StridedShard) else each for each in value.placements]
    )


def _placed_as(value: object, own: object) -> object:
    return value.redistribute(placements=own.placements) if isinstance(own, DTensor) else value  # type: ignore[attr-defined]

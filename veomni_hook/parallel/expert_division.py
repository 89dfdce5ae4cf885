"""Experts divided while a model is loaded, for releases of transformers that do not let others dispatch.

The patched `from_pretrained` calls `begin` when the model has no weights yet: its experts become those of
this process. What reads weights asks `converted`, so a process keeps its experts only. `finish` makes
DTensors of them, puts the dispatch in front and shards everything by FSDP2. From then on the model is like
one that newer releases divide themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from veomni_hook.kernels.shared.changed import changed
from veomni_hook.parallel.expert_dispatch import OncePerRank
from veomni_hook.parallel.expert_saving import save_pretrained
from veomni_hook.parallel.expert_units import fully_shard
from veomni_hook.parallel.groups import device

__all__ = ["begin", "converted", "finish", "in_turn"]

_ATTRIBUTE = "_veomni_division"


@dataclass
class _Division:
    """How the experts of a model that is being loaded are divided.

    Attributes:
        mesh: the world as ``(efsdp, ep)``: ranks that share experts are neighbours.
        modules: the experts.
        counts: for each of their parameters, by its name in the model: how many experts there are in all.
    """

    mesh: DeviceMesh
    modules: list[Any] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def part(self, name: str) -> slice:
        """Return which experts of a parameter this process has."""
        size = self.counts[name] // self.mesh["ep"].size()
        first = self.mesh["ep"].get_local_rank() * size
        return slice(first, first + size)


def begin(model: nn.Module, experts: Iterator[tuple[str, Any]], size: int) -> None:
    """Leave every ``size``-th part of ``experts``, by name, to this process; ``model`` has no weights yet."""
    _join()
    world = distributed.get_world_size()
    mesh = init_device_mesh(device(), (world // size, size), mesh_dim_names=("efsdp", "ep"))
    division = _Division(mesh)
    for name, module in experts:
        division.modules.append(module)
        module.num_experts //= size
        for key, parameter in module.named_parameters(recurse=False):
            division.counts[f"{name}.{key}"] = parameter.shape[0]
    model.__dict__[_ATTRIBUTE] = division


def in_turn(model: nn.Module) -> bool:
    """Whether tensors of a model are read when they are needed, not in advance by several threads.

    Threads would fill the memory with experts of other processes.
    """
    return _ATTRIBUTE in model.__dict__


def converted(mapping: Any, name: str, model: nn.Module, **options: Any) -> dict[str, Any]:
    """Return what ``mapping``, of transformers' loader, makes of tensors of a checkpoint: of experts, a part.

    Experts that are tensors of their own are read for this process only; stacked ones are cut.
    """
    division: _Division | None = model.__dict__.get(_ATTRIBUTE)
    if division is None or name not in division.counts:
        return mapping.convert(name, model=model, **options)  # type: ignore[no-any-return]
    for pattern, tensors in mapping.collected_tensors.items():
        if len(tensors) == division.counts[name]:
            mapping.collected_tensors[pattern] = tensors[division.part(name)]
    values: dict[str, Any] = mapping.convert(name, model=model, **options)
    for target in values.keys() & division.counts.keys():
        tensor: Tensor = values[target][0] if isinstance(values[target], list) else values[target]
        if tensor.shape[0] == division.counts[target]:
            values[target] = tensor[division.part(target)].clone()
        # Only now: conversions look at the shape of the whole parameter, the loader at that of the part.
        _cut(model, target, division.part(target))
    return values


def finish(model: Any) -> None:
    """Shard a model that has got its weights; nothing if its experts are not divided."""
    division: _Division | None = model.__dict__.pop(_ATTRIBUTE, None)
    if division is None:
        return
    world = init_device_mesh(device(), (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    for name in division.counts:
        if model.get_parameter(name).shape[0] == division.counts[name]:  # was not in the checkpoint
            _cut(model, name, division.part(name))
    for module in division.modules:
        _shard_experts(module, division.mesh)
    # From the inside out, as FSDP2 asks: what is sharded already is left out of what holds it.
    for module in reversed([*model.modules()]):
        # FSDP2 needs a group for each dtype.
        is_other = any(own.dtype != model.dtype for own in module.parameters(recurse=False))
        if module not in division.modules and (is_other or type(module).__name__ in model._no_split_modules):
            fully_shard(module, mesh=world)
    fully_shard(model, mesh=world)
    model._is_fsdp_managed_module = True  # read by transformers' generate: all ranks take the same steps
    model.save_pretrained = partial(save_pretrained, model)


def _cut(model: nn.Module, name: str, part: slice) -> None:
    (owner, _, key), whole = name.rpartition("."), model.get_parameter(name)
    own = nn.Parameter(whole.detach()[part].clone(), whole.requires_grad)
    model.get_submodule(owner)._parameters[key] = own


def _shard_experts(module: Any, mesh: DeviceMesh) -> None:
    for key, parameter in [*module.named_parameters(recurse=False)]:
        part = DTensor.from_local(parameter.detach().to(mesh.device_type), mesh["ep"], [Shard(0)])
        module._parameters[key] = nn.Parameter(part, parameter.requires_grad)
    dispatch = OncePerRank(module, mesh["ep"])

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        # The code of experts sees this rank's weights as tensors, whose gradients reach the DTensors.
        parts = {
            key: part.to_local() for key, part in module._parameters.items() if isinstance(part, DTensor)
        }
        with changed(module._parameters, parts):
            return dispatch(hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)

    module.forward = forward
    fully_shard(module, mesh=mesh["efsdp"])
    # Tokens of all ranks reach these experts, whose gradients are summed over a part of the ranks.
    module.set_gradient_divide_factor(float(mesh.size()))
    if mesh["efsdp"].size() > 1:
        # A factor in the reduction itself is NCCL's alone, and wrong there in bfloat16 (pytorch#190747).
        # One rank alone divides without a reduction.
        module.set_force_sum_reduction_for_comms(True)


def _join() -> None:
    """Join the job's processes, unless the script has done so."""
    if distributed.is_initialized():
        return
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group(distributed.get_default_backend_for_device(kind))

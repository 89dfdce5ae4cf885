"""Whether processes share the parameters of modules."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from torch import nn

__all__ = ["has_units", "is_sharded"]


def has_units(modules: Sequence[nn.Module]) -> bool:
    """Return whether one of the modules, or a part of it, is a unit of FSDP: its call gathers parameters."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    parts = (part for module in modules for part in module.modules())
    return any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in parts)


def is_sharded(modules: Sequence[nn.Module]) -> bool:
    """Return whether a part of the modules is in a unit of FSDP, or has a parameter that processes share."""
    from torch.distributed.tensor import DTensor

    if has_units(modules):
        return True
    for module in modules:
        for parameter in module.parameters():
            if isinstance(parameter, DTensor) and any(
                placement.is_shard() and parameter.device_mesh.size(dimension) > 1
                for dimension, placement in enumerate(parameter.placements)
            ):
                return True
    # A unit around them has replaced their parameters with whole ones; only its own record names them.
    inside = {id(part) for module in modules for part in module.modules()}
    return any(id(module) in inside for module in _modules_of_units())


def _modules_of_units() -> Iterator[nn.Module]:
    """The modules whose parameters the units of ``fully_shard`` hold."""
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        state: object = reference() if isinstance(reference, weakref.ref) else reference
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in groups if groups is not None else [getattr(state, "_fsdp_param_group", None)]:
            for parameter in getattr(group, "fsdp_params", ()):
                yield parameter._module_info.module

"""Experts that no other rank has: FSDP2 has nothing to gather and nothing to reduce for them.

Over one rank, `fully_shard` copies all weights for each unshard and all gradients for each reduction. So the
unit of such experts holds no weights: these stay DTensors over ``ep``, and autograd adds their gradients up.
What is left is the division by the number of ranks, whose tokens reach the experts. The dispatch divides the
gradient of the sums and multiplies those of the rows and of the routing weights, which are far smaller than
the weights'. With a power of two this is exact (in float16, down to its least numbers).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as of_torch
from torch.distributed.tensor import DTensor

from veomni_hook.patches.expert_release import dispatches

__all__ = ["announce", "fully_shard", "with_scaled_gradient"]

_ATTRIBUTE = "_veomni_dispatch"
#: All that transformers asks of FSDP2 for experts, if a config asks for nothing more.
_PLAIN = {"reshard_after_forward"}


def announce(experts: Any, dispatch: Any) -> None:
    """Let `fully_shard` know the dispatch of experts; its ``divisor`` then says who divides gradients.

    Changes ``transformers.distributed.fsdp.fully_shard`` where transformers divides experts itself.
    """
    setattr(experts, _ATTRIBUTE, dispatch)
    if dispatches():
        from transformers.distributed import fsdp  # from 5.23 on

        if fsdp.fully_shard is of_torch:
            fsdp.fully_shard = fully_shard


@wraps(of_torch)
def fully_shard(module: Any, *, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """`torch.distributed.fsdp.fully_shard`, without the weights of experts that no other rank has."""
    dispatch: Any = getattr(module, _ATTRIBUTE, None)
    alone = dispatch is not None and mesh is not None and mesh.size() == 1
    # Nothing else is asked of FSDP2, such as a dtype or a place, and all weights are divided.
    if alone and options.keys() <= _PLAIN and all(isinstance(one, DTensor) for one in module.parameters()):
        size = dispatch.ep_mesh.size()
        if size & (size - 1) == 0:
            dispatch.divisor = size
            options["ignored_params"] = {*module.parameters()}
    return of_torch(module, mesh=mesh, **options)


def with_scaled_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return ``tensor``, whose gradient is multiplied by ``factor``."""
    return tensor if factor == 1 else _Scaled.apply(tensor, factor)  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.detach()  # as a view, models could not add to it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None

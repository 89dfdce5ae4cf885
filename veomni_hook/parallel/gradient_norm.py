"""The norm of gradients that lie on several device meshes, and clipping by it.

Under expert parallelism experts are divided over other ranks than the rest, so their gradients are DTensors
of another mesh. `torch.nn.utils.clip_grad_norm_` refuses such a list. Here the norm is taken for each mesh
and then of these norms. It is the norm of the whole model, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["by_mesh", "clip_grad_norm_"]


def by_mesh(tensors: Iterable[Tensor]) -> dict[object, list[Tensor]]:
    """Return tensors by the mesh that they are divided over; None: the whole ones."""
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return found


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    foreach: bool | None = None,  # noqa: FBT001
) -> Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``; return the norm before.

    The arguments are those of `torch.nn.utils.clip_grad_norm_`, for parameters of any number of device
    meshes. Every rank must call this, with parameters in the same order. A norm that is not finite is the
    same on all ranks, so they all take the next step, or all raise.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite``.
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    groups = by_mesh(parameter for parameter in tensors if parameter.grad is not None).values()
    norms: list[Tensor] = []
    for group in groups:
        gradients = [tensor.grad for tensor in group if tensor.grad is not None]
        norm = get_total_norm(gradients, norm_type, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.zeros(())
    first = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total.item()}, so they cannot be clipped")
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total

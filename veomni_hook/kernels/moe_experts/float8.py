"""Experts whose products are computed in float8: what the setting ``precision`` binds them to.

Forward:  z = x[token] U_e;  y = gate(z) D_e, with scales of the rows of x and of gate(z), and of the weights'
          columns
Backward: products with grad[token] and dz likewise;  dU_e = (s dz)' q where the rows of x are s q, with
          scales of the columns of s dz, of one expert; dD_e likewise, with the rows of grad
Numbers and scales are those of `veomni_hook.kernels.float8.reference`, in MX with a scale for 32 neighbours
along each sum; all else is as in `triton` on a GPU, and as in `torch` on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from veomni_hook.kernels.float8.products import check_device, widths_refused
from veomni_hook.kernels.moe_experts import torch as on_cpu
from veomni_hook.kernels.moe_experts.forms import taken_apart
from veomni_hook.kernels.moe_experts.low_rank import without_adapters

__all__ = ["ROWS", "kernel", "kernel_in_mx", "refuses", "refuses_mx"]

#: Rows of an expert, on average, from which on a GPU multiplies in float8: with fewer, casts of the weights
#: take longer than the products save. Against bfloat16, an H200 took 0.97 and 0.78 of the time with as many
#: (128 experts of 2,048 x 768, 32 of 7,168 x 2,048), with half of them 1.13 and 0.97.
ROWS = 1024


def _home(device: str) -> ModuleType:
    if device == "cpu":
        return on_cpu
    from veomni_hook.kernels.moe_experts import triton  # may be missing where there is no GPU

    return triton


def kernel(variant: str, *, mx: bool = False) -> Callable[..., Tensor]:
    """Return the kernel for ``variant``."""
    homes = {device: _home(device) for device in ("cpu", "cuda") if device == "cpu" or find_spec("triton")}
    return partial(
        _run,
        {device: (home.kernel(variant), home.in_float8(variant, mx=mx)) for device, home in homes.items()},
    )


def _run(
    kernels: Mapping[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    *operands: Any,
) -> Tensor:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    many = x.is_cpu or (dtype is not torch.float32 and index.numel() >= ROWS * up.shape[0])
    return kernels[kind][many](x, index, weights, up, *operands)


def refuses(owner: object, *operands: Any, mx: bool = False) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run, or None.

    Raises:
        KernelError: their device has no float8, or there is no Triton for it.
    """
    check_device(operands[0], mx=mx)
    reason: str | None = _home(operands[0].device.type).refuses(owner, *operands)
    if reason is not None:
        return reason
    tensors, _ = taken_apart(without_adapters(operands))
    return widths_refused(tensors.up, mx=mx) or widths_refused(tensors.down, mx=mx)


kernel_in_mx, refuses_mx = partial(kernel, mx=True), partial(refuses, mx=True)

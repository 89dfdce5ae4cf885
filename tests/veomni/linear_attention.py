"""Linear attention over packed sequences in plain torch, as kernels of VeOmni's registry.

The eager code of VeOmni's models refuses packed sequences, and what computes them there needs a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NAME = "stand_in"


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    assert activation == "silu"
    width = weight.shape[-1]
    parts = []
    for part in _sequences(x, cu_seqlens):
        padded = functional.pad(part.transpose(1, 2), (width - 1, 0))
        parts.append(functional.conv1d(padded, weight[:, None], bias, groups=len(weight)).transpose(1, 2))
    return functional.silu(torch.cat(parts, dim=1)), None


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    query = _normalized(query) * query.shape[-1] ** -0.5
    key = _normalized(key)
    outputs = []
    for q, k, v, decay, rate in zip(
        *(_sequences(operand, cu_seqlens) for operand in (query, key, value, g, beta)), strict=True
    ):
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
        for at in range(v.shape[1]):
            state = state * decay[:, at].exp()[..., None, None]
            known = torch.einsum("bhkv,bhk->bhv", state, k[:, at])
            change = (v[:, at] - known) * rate[:, at][..., None]
            state = state + k[:, at][..., None] * change[:, :, None]
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, at]))
    return torch.stack(outputs, dim=1), None


def _normalized(x: Tensor) -> Tensor:
    """As the packages do it: a small number is added to the sum of squares."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _sequences(x: Tensor, edges: Tensor) -> tuple[Tensor, ...]:
    return x.split(edges.diff().tolist(), dim=1)


def register() -> None:
    """Offer both to VeOmni's models under `NAME`."""
    from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

    anywhere = HardwareRequirement(device_type="any")
    for kernel in (causal_conv1d, chunk_gated_delta_rule):
        KERNEL_REGISTRY.register(
            KernelSpec(NAME, kernel.__name__, "standard", lambda kernel=kernel: kernel, anywhere)
        )

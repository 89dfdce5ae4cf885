"""What benchmarks of kernels time: the upstream formulas, and one step forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

EPS = 1e-6


def upstream_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what the installed Qwen3's RMSNorm returns; this process must not be patched."""
    return Qwen3RMSNorm.forward(SimpleNamespace(weight=weight, variance_epsilon=EPS), x)


def upstream_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the middle of upstream's gated MLP."""
    return functional.silu(gate) * up


def step(
    function: Callable[..., object], inputs: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
) -> None:
    """Run `function` and its backward; gradients of `inputs` start from nothing."""
    for tensor in inputs:
        tensor.requires_grad_().grad = None
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, list(incoming) or None)

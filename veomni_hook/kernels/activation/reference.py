"""Activations by definition: the oracles for tests, and what the idiom looks for.

``x`` may have any shape, and results have the same. Every operator rounds to its dtype, as upstream's; under
autocast on CUDA, powers are computed in float32, and with them the results.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

Tensor = torch.Tensor


def gelu_tanh_cubed(x: Tensor) -> Tensor:
    """Return GELU by tanh, whose argument has the cube of ``x``."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def gelu_tanh_factored(x: Tensor) -> Tensor:
    """Return GELU by tanh, whose argument is a product with ``x``."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def quick_gelu(x: Tensor) -> Tensor:
    """Return ``x`` times a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def relu_squared(x: Tensor) -> Tensor:
    """Return the square of what is positive."""
    return torch.square(functional.relu(x))

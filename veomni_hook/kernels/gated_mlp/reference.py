"""Gated activations by definition: the oracles for tests and benchmarks, and what the idiom looks for.

``gate`` and ``up`` are ``[..., intermediate]`` and so are the results; ``activation`` maps a tensor to one of
its shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]


def product(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return ``activation(gate) * up``."""
    return activation(gate) * up


def product_float32(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return ``activation(gate) * up``, computed in float32, in the dtype of ``gate``."""
    return (activation(gate.float()) * up.float()).to(gate.dtype)


def clamped(gate: torch.Tensor, up: torch.Tensor, activation: Activation, limit: float) -> torch.Tensor:
    """Return ``activation(gate) * up``, ``gate`` cut off above ``limit``, ``up`` on both sides."""
    return activation(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def clamped_after(gate: torch.Tensor, up: torch.Tensor, activation: Activation, limit: float) -> torch.Tensor:
    """Return ``activation(gate) * up``, the activation cut off above ``limit``, ``up`` on both sides."""
    return activation(gate).clamp(max=limit) * up.clamp(min=-limit, max=limit)


def scaled_sigmoid(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)`` with both cut off at ``limit``."""
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1.0) * (gate * torch.sigmoid(gate * alpha))

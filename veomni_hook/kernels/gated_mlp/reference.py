"""The gated SiLU by definition: the oracle for tests and benchmarks."""

from __future__ import annotations

import torch

__all__ = ["gated_silu"]


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, all ``[..., intermediate]``."""
    return torch.nn.functional.silu(gate) * up

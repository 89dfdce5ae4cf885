"""Parts of heads by definition: the oracle for tests.

Shapes: x ``[..., first + second]``, its parts ``[..., first]`` and ``[..., second]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["joined", "split"]


def split(x: torch.Tensor, sizes: Sequence[int], dim: int, function: Any) -> tuple[torch.Tensor, ...]:
    """Return views of ``x`` with ``sizes`` along ``dim``; ``function`` is what upstream calls."""
    return torch.split(x, list(sizes), dim)


def joined(parts: Sequence[torch.Tensor], dim: int, function: Any) -> torch.Tensor:
    """Return ``parts`` side by side along ``dim``; ``function`` is what upstream calls."""
    return torch.cat(list(parts), dim)

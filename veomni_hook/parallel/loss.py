"""The fused loss over rows that a sequence group shares: each process computes the loss of its part.

The rows are those that `gather` returns: every process has all of them, so any division is right. With this,
no process repeats the products of the head. Upstream's loss and other heads repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from veomni_hook.kernels.linear_cross_entropy.shares import SHARED
from veomni_hook.parallel import process
from veomni_hook.parallel.collectives import all_averaged
from veomni_hook.parallel.groups import SequenceGroup
from veomni_hook.parallel.sharding import sharding_of

__all__ = ["attach"]


@dataclass(frozen=True)
class _Rows:
    group: SequenceGroup

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_averaged(self, x: torch.Tensor) -> torch.Tensor:
        return all_averaged(x, self.group)


def attach() -> None:
    """Let the fused loss ask which models share their rows."""
    SHARED.find = _find


def _find(model: object) -> _Rows | None:
    """Return the group of a model whose base model is split, or None."""
    if process.sizes().sp == 1 or not torch.is_grad_enabled() or not isinstance(model, torch.nn.Module):
        return None
    shardings = (sharding_of(module) for module in model.modules())
    sharding = next((sharding for sharding in shardings if sharding is not None), None)
    return None if sharding is None else _Rows(sharding.group)

"""Routes where processes share sequences: whole ones are kept, and each router gets its positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from veomni_hook.parallel.collectives import gathered, own_part, part_length
from veomni_hook.parallel.groups import SequenceGroup
from veomni_hook.parallel.sharding import in_force

__all__ = ["Split", "split_of"]


class Split(NamedTuple):
    """How the positions of a batch are split over processes.

    Attributes:
        group: the processes.
        batch: the rows of the batch.
        full: the positions of a row.
    """

    group: SequenceGroup
    batch: int
    full: int

    @property
    def tokens(self) -> int:
        """How many tokens the whole batch has."""
        return self.batch * self.full

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this process's tokens ``[own tokens, k]`` of all ``[tokens, k]``."""
        by_row = rows.view(self.batch, self.full, rows.shape[-1])
        return own_part(by_row, 1, self.group).flatten(0, 1)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Return all tokens ``[tokens, k]``, from those of each process; every process has to call it."""
        # As bytes: not every backend sends every integer.
        by_row = rows.contiguous().view(torch.uint8).view(self.batch, -1, rows.shape[-1] * rows.itemsize)
        every = gathered(by_row, 1, self.full, self.group)
        return every.flatten(0, 1).view(rows.dtype)

    def once(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this process's tokens without the copies at the end of a row."""
        part = part_length(self.full, self.group)
        inside = max(0, min(part, self.full - self.group.rank * part))
        return rows.view(self.batch, part, rows.shape[-1])[:, :inside].flatten(0, 1)


def split_of(router: nn.Module, tokens: int) -> Split | None:
    """Return how the batch is split of which ``router`` gets ``tokens`` in this pass; None: it is not."""
    sharding = in_force(router)
    if sharding is None or sharding.group.size == 1:
        return None
    part = part_length(sharding.full, sharding.group)
    return None if tokens % part else Split(sharding.group, tokens // part, sharding.full)

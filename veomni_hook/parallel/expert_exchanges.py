"""Rows to the ranks of a group and back, in two ways: those that a rank wants, or all.

`there` takes ``[tokens, width]`` to ``[received, width]``, `back` takes ``[received, width]`` to the sums
``[tokens, width]`` of what the ranks return for a token. Each is the gradient of the other. Sums are formed
in float32, in the order of ranks, and rounded once.

`there` returns rows that may still be on their way; `arrived` waits for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.nn.functional import pad

from veomni_hook.kernels.shared.readiness import as_soon_as_ready
from veomni_hook.parallel.expert_copies import Copies, collect, spread

__all__ = ["Exchange", "OfAll", "OfWanted", "arrived"]

_OPS = torch.ops._c10d_functional


class OfWanted(NamedTuple):
    """Each rank gets the rows that it wants.

    Attributes:
        copies: from tokens to sent rows.
        sent: rows for each rank.
        received: rows from each rank.
        group: the ranks.
    """

    copies: Copies
    sent: list[int]
    received: list[int]
    group: Any

    def there(self, rows: Tensor) -> Tensor:
        """Return what the ranks send here of their ``rows``, in the order of ranks."""
        return _exchanged(spread(rows, self.copies), self.sent, self.received, self.group)

    def back(self, rows: Tensor) -> Tensor:
        """Return, for each row of this rank, the sum of what the ranks made of it."""
        returned = _exchanged(rows, self.received, self.sent, self.group)
        return collect(arrived(returned), self.copies)


class OfAll(NamedTuple):
    """Each rank gets all rows. Nobody has to know how many a rank wants, and nothing is picked.

    Attributes:
        tokens: rows of this rank.
        most: rows of the rank that has most; the others add rows of zeros.
        size: how many ranks there are.
        group: the ranks, by name.
    """

    tokens: int
    most: int
    size: int
    group: str

    def there(self, rows: Tensor) -> Tensor:
        """Return the ``rows`` of all ranks, in the order of ranks."""
        missing = self.most - self.tokens
        return _to_all(pad(rows, (0, 0, 0, missing)) if missing else rows, self.size, self.group)

    def back(self, rows: Tensor) -> Tensor:
        """Return, for each row of this rank, the sum of what the ranks made of it."""
        return _from_all(rows, self.size, self.group)[: self.tokens]


#: How the rows of one call travel.
Exchange: TypeAlias = OfWanted | OfAll


def arrived(rows: Tensor) -> Tensor:
    """Wait for ``rows``: kernels must not get a tensor whose data may still arrive."""
    return _Arrived.apply(rows)  # type: ignore[no-untyped-call,no-any-return]


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        waited: Tensor = wait_tensor(rows)  # type: ignore[no-untyped-call]
        return waited

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    return all_to_all_single_autograd(rows.contiguous(), received, sent, group)


class _Group(Protocol):
    size: int
    group: str


class _ToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Group, rows: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        gathered: Tensor = _OPS.all_gather_into_tensor(rows.contiguous(), size, group)
        return gathered

    @staticmethod
    def backward(ctx: _Group, grad: Tensor) -> tuple[Tensor, None, None]:
        return _from_all(grad, ctx.size, ctx.group), None, None


class _FromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Group, rows: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        equal = [rows.shape[0] // size] * size

        def returned(rows: Tensor) -> Tensor:
            arriving = _OPS.all_to_all_single(rows.contiguous(), equal, equal, group)
            return _OPS.wait_tensor(arriving)  # type: ignore[no-any-return]

        # In backward, experts compute gradients of weights while those of rows travel.
        return as_soon_as_ready(returned, rows).view(size, -1, rows.shape[1]).sum(0)

    @staticmethod
    def backward(ctx: _Group, grad: Tensor) -> tuple[Tensor, None, None]:
        return arrived(_to_all(grad, ctx.size, ctx.group)), None, None


def _to_all(rows: Tensor, size: int, group: str) -> Tensor:
    return _ToAll.apply(rows, size, group)  # type: ignore[no-untyped-call,no-any-return]


def _from_all(rows: Tensor, size: int, group: str) -> Tensor:
    return _FromAll.apply(rows, size, group)  # type: ignore[no-untyped-call,no-any-return]

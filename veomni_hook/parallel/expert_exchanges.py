"""Rows to the ranks of a group and back, in two ways: those that a rank wants, or all.

`there` takes ``[tokens, width]`` to ``[received, width]``, `back` takes ``[received, width]`` to the sums
``[tokens, width]`` of what the ranks return for a token. Each is the gradient of the other. Sums are formed
in float32, in the order of ranks, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor, autograd
from torch.nn.functional import pad

from veomni_hook.kernels.shared.autograd import applied
from veomni_hook.kernels.shared.readiness import as_soon_as_ready
from veomni_hook.parallel.expert_copies import Copies, collect, spread

__all__ = ["Exchange", "OfAll", "OfWanted"]

_Splits: TypeAlias = list[int] | None


def _nothing() -> None:
    pass


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

    def there(self, rows: Tensor, meanwhile: Callable[[], None] = _nothing) -> Tensor:
        """Return what the ranks send here of their ``rows``, in the order of ranks.

        The host calls ``meanwhile`` when rows are on their way.
        """
        return _exchange(spread(rows, self.copies), self.sent, self.received, self.group, meanwhile)  # type: ignore[no-any-return]

    def back(self, rows: Tensor) -> Tensor:
        """Return, for each row of this rank, the sum of what the ranks made of it."""
        return collect(_exchange(rows, self.received, self.sent, self.group, _nothing), self.copies)


class OfAll(NamedTuple):
    """Each rank gets all rows. Nobody has to know how many a rank wants, and nothing is picked.

    Attributes:
        tokens: rows of this rank.
        most: rows of the rank that has most; the others add rows of zeros.
        group: the ranks.
    """

    tokens: int
    most: int
    group: Any

    def there(self, rows: Tensor, meanwhile: Callable[[], None] = _nothing) -> Tensor:
        """Return the ``rows`` of all ranks, in the order of ranks.

        The host calls ``meanwhile`` when rows are on their way.
        """
        missing = self.most - self.tokens
        rows = pad(rows, (0, 0, 0, missing)) if missing else rows
        return _to_all(rows, self.group, meanwhile)  # type: ignore[no-any-return]

    def back(self, rows: Tensor) -> Tensor:
        """Return, for each row of this rank, the sum of what the ranks made of it."""
        return _from_all(rows, self.group)[: self.tokens]  # type: ignore[no-any-return]


#: How the rows of one call travel.
Exchange: TypeAlias = OfWanted | OfAll


# Plain collectives: the operators of torch's functional ones take the host several times as long.


class _Exchange(autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: object,
        meanwhile: Callable[[], None],
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        return _all_to_all(arrived, rows, received, sent, group, meanwhile)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.group, _nothing), None, None, None, None


class _ToAll(autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, meanwhile: Callable[[], None]) -> Tensor:
        ctx.group = group
        arrived = rows.new_empty(group.size() * rows.shape[0], rows.shape[1])
        work: Any = dist.all_gather_into_tensor(arrived, rows.contiguous(), group=group, async_op=True)
        meanwhile()
        work.wait()
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _from_all(grad, ctx.group), None, None


class _FromAll(autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group

        def returned(rows: Tensor) -> Tensor:
            return _all_to_all(rows.new_empty(rows.shape), rows, None, None, group, _nothing)

        # In backward, experts compute gradients of weights while those of rows travel.
        return as_soon_as_ready(returned, rows).view(group.size(), -1, rows.shape[1]).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_all(grad, ctx.group, _nothing), None


def _all_to_all(
    arrived: Tensor, rows: Tensor, received: _Splits, sent: _Splits, group: Any, meanwhile: Callable[[], None]
) -> Tensor:
    work: Any = dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group, async_op=True)
    meanwhile()
    work.wait()
    return arrived


_exchange, _to_all, _from_all = applied(_Exchange), applied(_ToAll), applied(_FromAll)

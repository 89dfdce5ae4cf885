"""Whether a row's results depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

#: Parts of a batch: one row, some, all but the last.
PARTS = (slice(17, 18), slice(5, 40), slice(0, -1))


def assert_batch_invariant(
    function: Callable[..., torch.Tensor],
    rows: Sequence[torch.Tensor],
    more: Sequence[torch.Tensor] = (),
    fixed: Sequence[torch.Tensor] = (),
) -> None:
    """Results and gradients of ``rows``, tensors ``[batch, columns]``, have the same bits in any batch.

    ``more`` are operands that belong to no row; their gradients are sums over rows, and not compared. ``fixed`` are rows
    without gradients.
    """
    torch.manual_seed(3)
    whole = function(*rows, *more, *fixed)
    dy = torch.randn(whole.shape, device=whole.device).to(whole.dtype)
    expected = _run(function, rows, (*more, *fixed), dy)
    for again in (slice(None), *PARTS):
        # Copies: as the results of other operations they begin at addresses of their own.
        beside = [row[again].clone() for row in fixed]
        found = _run(function, [row[again].clone() for row in rows], (*more, *beside), dy[again].clone())
        for got, truth in zip(found, expected, strict=True):
            assert torch.equal(got, truth[again]), again


def _run(
    function: Callable[..., torch.Tensor],
    rows: Sequence[torch.Tensor],
    more: Sequence[torch.Tensor],
    dy: torch.Tensor,
) -> list[torch.Tensor]:
    leaves = [row.detach().requires_grad_() for row in rows]
    y = function(*leaves, *more)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

"""The gradient of a weight as the sum of products over chunks of rows, and the precision of that sum."""

from __future__ import annotations

import torch

__all__ = ["WeightGradient", "precision"]

# A product of 16-bit operands added to a sum in float32, without a product of its own: 67 ms instead of 76 ms
# at 8,192 x 4,096 x 151,936 on an H200.
ADDS_IN_FLOAT32 = "dtype_out" in torch.ops.aten.addmm.overloads()  # type: ignore[no-untyped-call]


def precision(low: torch.dtype, kept: torch.dtype, *, in_float32: bool) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the sum and of the result, for products in ``low`` and a weight held in ``kept``.

    float16 cannot hold sums of thousands of rows, and its result is multiplied by a loss scale later.
    """
    if low is torch.float16 or (kept is torch.float32 and low is not torch.float64):
        return torch.float32, torch.float32
    return (torch.float32 if in_float32 and low is torch.bfloat16 else low), low


class WeightGradient:
    """The sum of ``grad_logits.T @ x`` over chunks, ``[vocab, hidden]``, made in the dtype ``total``."""

    def __init__(self, weight: torch.Tensor, total: torch.dtype) -> None:
        self._beta = 0
        self._total = torch.empty(weight.shape, dtype=total, device=weight.device)

    def add(self, grad_logits: torch.Tensor, x: torch.Tensor) -> None:
        """Add one chunk: ``grad_logits`` ``[rows, vocab]`` and ``x`` ``[rows, hidden]``, of one dtype."""
        total, beta, self._beta = self._total, self._beta, 1
        if total.dtype is x.dtype:
            total.addmm_(grad_logits.t(), x, beta=beta)
        elif ADDS_IN_FLOAT32 and x.is_cuda:
            torch.addmm(total, grad_logits.t(), x, beta=beta, out_dtype=total.dtype, out=total)
        elif x.is_cuda:
            total = total if beta else total.zero_()
            total.add_(grad_logits.t() @ x)
        else:
            # A CPU without bfloat16 units is five times faster in float32.
            grad, x = grad_logits.to(total.dtype), x.to(total.dtype)
            total.addmm_(grad.t(), x, beta=beta)

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum in ``dtype``, and keep nothing."""
        if not self._beta:
            self._total.zero_()
        total = self._total
        del self._total
        return total.to(dtype)

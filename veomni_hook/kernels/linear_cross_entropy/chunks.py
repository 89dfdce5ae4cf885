"""The products of a linear layer and its gradients over chunks of rows that share one logits buffer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from veomni_hook.kernels.linear_cross_entropy.autograd import Needed
from veomni_hook.kernels.linear_cross_entropy.weight_gradient import WeightGradient

__all__ = ["ALIGNED", "Sums", "chunks", "divisor"]

#: Rows of logits begin at multiples of this many bytes, for cuBLAS and vector loads.
ALIGNED = 128


def chunks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int, aligned: int = ALIGNED
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the rows of each chunk of ``size`` and its logits, which are valid until the next chunk.

    Rows of logits begin at multiples of ``aligned`` bytes.
    """
    rows, vocab = x.shape[0], weight.shape[0]
    step = max(1, aligned // x.element_size())
    buffer = torch.empty(min(size, rows), -(-vocab // step) * step, dtype=x.dtype, device=x.device)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        logits = buffer[: part.stop - start, :vocab]
        if bias is None:
            torch.mm(x[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[part], weight.t(), out=logits)
        yield part, logits


class Sums:
    """Accumulates the needed gradients of x, weight and bias over chunks of logit gradients.

    ``dtypes`` are those of the weight gradient's sum and result; see `weight_gradient.precision`.
    """

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, needed: Needed, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        self._x, self._weight = x, weight
        self._of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed.x else None
        self._of_weight = WeightGradient(weight, *dtypes) if needed.weight else None
        self._of_bias = x.new_zeros(weight.shape[0], dtype=torch.float32) if needed.bias else None

    def add(self, rows: slice, grad_logits: torch.Tensor) -> None:
        """Add one chunk, in the dtype of x."""
        if self._of_x is not None:
            torch.mm(grad_logits, self._weight, out=self._of_x[rows])
        if self._of_weight is not None:
            self._of_weight.add(grad_logits, self._x[rows])
        if self._of_bias is not None:
            self._of_bias += grad_logits.sum(0, dtype=torch.float32)

    def results(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, of the weight and (in float32) of the bias."""
        of_weight = None if self._of_weight is None else self._of_weight.result()
        return self._of_x, of_weight, self._of_bias


def divisor(
    target: torch.Tensor, num_items: torch.Tensor | None, weights: torch.Tensor | None, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divisor of the sum of losses and the factor of its gradients; float32."""
    if num_items is not None:
        items = num_items.to(torch.float32)
        return items, items.reciprocal().reshape(())
    kept = target != ignore_index
    items = kept.sum(dtype=torch.float32) if weights is None else weights.where(kept, 0).sum()
    # If all positions are ignored, the mean is NaN but gradients are zero, as upstream.
    return items, items.where(items != 0, 1).reciprocal()

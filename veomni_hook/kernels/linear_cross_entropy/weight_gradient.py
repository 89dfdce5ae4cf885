"""The gradient of a weight as the sum of products over chunks of rows, and the precision of that sum."""

from __future__ import annotations

import torch

__all__ = ["WeightGradient", "precision"]

# Adds a product of 16-bit operands to a float32 sum without a temporary: 67 ms instead of 76 ms at
# 8,192 x 4,096 x 151,936 on an H200.
ADDS_IN_FLOAT32 = "dtype_out" in torch.ops.aten.addmm.overloads()  # type: ignore[no-untyped-call]
PARTS = 8


def precision(low: torch.dtype, kept: torch.dtype, *, in_float32: bool) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the sum and the result, for products in ``low`` and a weight stored in ``kept``.

    float16 cannot represent sums of thousands of rows, and its result is multiplied by a loss scale later.
    """
    if low is torch.float16 or (kept is torch.float32 and low is not torch.float64):
        return torch.float32, torch.float32
    return (torch.float32 if in_float32 and low is torch.bfloat16 else low), low


class WeightGradient:
    """The sum of ``grad_logits.T @ x`` over chunks, ``[vocab, hidden]``: in ``total``, then in ``result``."""

    def __init__(
        self,
        weight: torch.Tensor,
        total: torch.dtype,
        result: torch.dtype,
        split: tuple[int, int] | None = None,
    ) -> None:
        """Start with zero.

        Args:
            weight: ``[vocab, hidden]``.
            total: the dtype of the sum.
            result: the dtype that it is returned in.
            split: in how many columns the logits' gradients are multiplied apart, the second of which end
                in padding; None: all at once.
        """
        self._beta = 0
        self._dtype = result
        self._vocab, hidden = weight.shape
        self._rest: torch.Tensor | None = None

        def empty(rows: int) -> torch.Tensor:
            return torch.empty(rows, hidden, dtype=total, device=weight.device)

        if split is not None:
            self._parts, self._rest = [empty(self._vocab)], empty(split[1])
            self._added = [self._parts[0][: split[0]], self._rest]
            return
        # On a CPU a higher-precision sum is allocated and freed part by part. With the whole sum beside the
        # result, the peak at 2,048 x 1,024 x 151,936 in bfloat16 is 0.87 GiB; upstream's is 3.48.
        apart = weight.device.type == "cpu" and total is not result
        rows = -(-self._vocab // PARTS) if apart else max(1, self._vocab)
        self._parts = [empty(min(rows, self._vocab - start)) for start in range(0, max(1, self._vocab), rows)]
        self._added = self._parts

    def add(self, grad_logits: torch.Tensor, x: torch.Tensor) -> None:
        """Add one chunk: ``grad_logits`` ``[rows, columns]`` and ``x`` ``[rows, hidden]``, of one dtype."""
        beta, self._beta = self._beta, 1
        if x.device.type == "cpu":
            # Without bfloat16 units, float32 is five times as fast.
            x = x.to(self._parts[0].dtype)
        begin = 0
        for part in self._added:
            columns = grad_logits[:, begin:][:, : part.shape[0]]
            begin += part.shape[0]
            if part.numel():
                _add(part, columns.to(x.dtype), x, beta)

    def result(self) -> torch.Tensor:
        """Return the sum and release it."""
        if not self._beta:
            for part in self._added:
                part.zero_()
        if self._rest is not None:
            tail = self._parts[0][self._added[0].shape[0] :]
            tail.copy_(self._rest[: tail.shape[0]])
        parts, self._parts, self._added = self._parts, [], []
        for number in range(len(parts)):
            parts[number] = parts[number].to(self._dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _add(total: torch.Tensor, grad_logits: torch.Tensor, x: torch.Tensor, beta: int) -> None:
    if total.dtype is x.dtype:
        if beta:
            total.addmm_(grad_logits.t(), x)
        else:
            # Not addmm with beta 0: a compiler may multiply uninitialised memory by it.
            torch.mm(grad_logits.t(), x, out=total)
    # Writes the result over an operand; no compiler is known to trace that.
    elif ADDS_IN_FLOAT32 and x.is_cuda and not torch.compiler.is_compiling():
        torch.addmm(total, grad_logits.t(), x, beta=beta, out_dtype=total.dtype, out=total)
    else:
        (total if beta else total.zero_()).add_(grad_logits.t() @ x)

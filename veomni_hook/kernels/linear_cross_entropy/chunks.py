"""The products of a linear layer and its gradients over chunks of rows that share one logits buffer.

cuBLAS multiplies 16-bit matrices at a fifth to an eighth of its rate where a width is no multiple of 16
bytes, as a vocabulary of 49,155. The last rows of such a weight are copied and padded with zeros, and each
product is made in two: with the rows before these, and with the copy. H200, 8,192 x 4,096 x 49,155, the
three products of a step: 76.7 ms, 63.2 if rows of logits are aligned, 12.2 if the widths are, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from veomni_hook.kernels.linear_cross_entropy.autograd import Needed

__all__ = ["ALIGNED", "Chunk", "Head", "Sums", "chunks", "divisor", "precision"]

#: Rows of logits begin at multiples of this many bytes, for cuBLAS and vector loads.
ALIGNED = 128
#: Widths of products are multiples of this many bytes on these devices.
WIDTH, PADDED_ON = 16, frozenset({"cuda"})
# Elements of a weight that are copied: a product with fewer does not fill the GPU, and takes as long.
COPIED, ROWS_COPIED = 1 << 22, 128
# Adds a product of 16-bit operands to a float32 sum without a temporary: 67 ms instead of 76 ms at
# 8,192 x 4,096 x 151,936 on an H200.
ADDS_IN_FLOAT32 = "dtype_out" in torch.ops.aten.addmm.overloads()  # type: ignore[no-untyped-call]
PARTS = 8


class Head(NamedTuple):
    """A linear layer as the products take it.

    Attributes:
        weight: ``[vocab, hidden]``.
        bias: ``[vocab]``.
        whole: how many of the weight's rows are multiplied as they are.
        rest: the other rows, followed by zeros, ``[any, hidden]``; None: there are none.
        bias_rest: the same of the bias.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    whole: int
    rest: torch.Tensor | None = None
    bias_rest: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Head:
        """Return the layer for products in the dtype of ``weight``; in traced code, of any widths."""
        vocab, hidden = weight.shape
        width = WIDTH // weight.element_size()
        # dynamo (torch 2.11) cannot write to rows with padding between them.
        traced = torch.compiler.is_compiling()
        if traced or vocab % width == 0 or weight.device.type not in PADDED_ON:
            return cls(weight, bias, vocab)
        columns = -(-vocab // width) * width
        rest = min(columns, max(1, COPIED // max(1, hidden) // ROWS_COPIED) * ROWS_COPIED)
        whole = columns - rest
        return cls(
            weight,
            bias,
            whole,
            _padded(weight[whole:], rest),
            None if bias is None else _padded(bias[whole:], rest),
        )

    @property
    def columns(self) -> int:
        """The columns of logits, those of padding included."""
        return self.whole + (0 if self.rest is None else self.rest.shape[0])

    def logits(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the logits of ``x`` to ``out`` ``[rows, columns]``; those of padding are 0."""
        if self.whole:
            bias = None if self.bias is None else self.bias[: self.whole]
            _linear(x, self.weight[: self.whole], bias, out[:, : self.whole])
        if self.rest is not None:
            _linear(x, self.rest, self.bias_rest, out[:, self.whole :])

    def gradient(self, grad_logits: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient of x to ``out``, from that of its logits, ``[rows, columns]``."""
        if self.rest is None:
            torch.mm(grad_logits, self.weight, out=out)
            return
        # The smaller product first: it alone is rounded twice.
        torch.mm(grad_logits[:, self.whole :], self.rest, out=out)
        if self.whole:
            out.addmm_(grad_logits[:, : self.whole], self.weight[: self.whole])


def _padded(rows: torch.Tensor, number: int) -> torch.Tensor:
    padded = rows.new_zeros(number, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    elif out.is_contiguous():
        torch.addmm(bias, x, weight.t(), out=out)
    else:
        # On an H200, torch 2.11, sums that are written to rows with a gap between them were rounded twice.
        out.copy_(torch.addmm(bias, x, weight.t()))


class Chunk(NamedTuple):
    """Rows and their logits, which are valid until the next chunk.

    Attributes:
        rows: which.
        logits: ``[rows, vocab]``.
        padded: the same memory with the head's columns of padding, whose gradient is 0.
    """

    rows: slice
    logits: torch.Tensor
    padded: torch.Tensor


def chunks(x: torch.Tensor, head: Head, size: int, aligned: int = ALIGNED) -> Iterator[Chunk]:
    """Yield chunks of ``size`` rows; rows of logits begin at multiples of ``aligned`` bytes."""
    rows, vocab = x.shape[0], head.weight.shape[0]
    # With a bias, no gap between rows that does not have to be; see `_linear`.
    aligned = aligned if head.bias is None else min(aligned, WIDTH)
    step = max(1, aligned // x.element_size())
    buffer = torch.empty(min(size, rows), -(-head.columns // step) * step, dtype=x.dtype, device=x.device)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        padded = buffer[: part.stop - start, : head.columns]
        head.logits(x[part], padded)
        yield Chunk(part, padded[:, :vocab], padded)


def precision(low: torch.dtype, kept: torch.dtype, *, in_float32: bool) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the sum and the result, for products in ``low`` and a weight stored in ``kept``.

    float16 cannot represent sums of thousands of rows, and its result is multiplied by a loss scale later.
    """
    if low is torch.float16 or (kept is torch.float32 and low is not torch.float64):
        return torch.float32, torch.float32
    return (torch.float32 if in_float32 and low is torch.bfloat16 else low), low


class _WeightGradient:
    """The sum of ``grad_logits.T @ x`` over chunks, ``[vocab, hidden]``: in ``total``, then in ``result``."""

    def __init__(self, head: Head, total: torch.dtype, result: torch.dtype) -> None:
        self._beta = 0
        self._dtype = result
        weight = head.weight
        vocab, hidden = weight.shape
        self._rest = None if head.rest is None else weight.new_empty(head.rest.shape[0], hidden, dtype=total)
        if self._rest is not None:
            self._parts = [weight.new_empty(vocab, hidden, dtype=total)]
            self._added = [self._parts[0][: head.whole], self._rest]
            return
        # On a CPU a higher-precision sum is allocated and freed part by part. With the whole sum beside the
        # result, the peak at 2,048 x 1,024 x 151,936 in bfloat16 is 0.87 GiB; upstream's is 3.48.
        apart = weight.device.type == "cpu" and total is not result
        rows = -(-vocab // PARTS) if apart else max(1, vocab)
        self._parts = [
            weight.new_empty(min(rows, vocab - start), hidden, dtype=total)
            for start in range(0, max(1, vocab), rows)
        ]
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


class Sums:
    """Accumulates the needed gradients of x, weight and bias over chunks of logit gradients.

    ``dtypes`` are those of the weight gradient's sum and result; see `chunks.precision`.
    """

    def __init__(
        self, x: torch.Tensor, head: Head, needed: Needed, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        self._x, self._head, self.needed = x, head, needed
        self._of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed.x else None
        self._of_weight = _WeightGradient(head, *dtypes) if needed.weight else None
        self._of_bias = x.new_zeros(head.weight.shape[0], dtype=torch.float32) if needed.bias else None

    def add(self, chunk: Chunk) -> None:
        """Add a chunk whose logits were overwritten by their gradient."""
        rows, grad_logits, padded = chunk
        if self._of_x is not None:
            self._head.gradient(padded, self._of_x[rows])
        if self._of_weight is not None:
            self._of_weight.add(padded, self._x[rows])
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

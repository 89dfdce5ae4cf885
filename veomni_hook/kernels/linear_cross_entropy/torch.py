"""Linear cross-entropy over chunks of rows, with its gradients computed in the forward.

Forward:  loss = sum_i(logsumexp(z_i) - z_i[target_i]) / items,  z = t(float32(x @ weight.T + bias))
Backward: dx = d @ weight, dweight = d.T @ x, dbias = sum_i(d_i),
          d = t' (softmax(z) - onehot(target)) / items
          t is a factor and a soft cap (or nothing): t(y) = softcap tanh(factor y / softcap)
Shapes: x [rows, hidden], weight [vocab, hidden], bias [vocab], target [rows] int64; loss float32, [].
Saved: the gradients, and x, weight, bias, target for a second derivative. Mutates: nothing.
Float32: t, softmax, loss, dbias, and dweight while chunks are added to it. Rows to ignore are never computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.linear_cross_entropy import causal_lm, reference
from veomni_hook.kernels.linear_cross_entropy.transform import IDENTITY, Transform

__all__ = ["causal_lm_output", "linear_cross_entropy", "loses"]

# Forward and backward on 2 cores, vocabularies 384 to 32,000: a tie at 4 million logits, slower below, 1.05
# to 1.3 times faster from 16 million (64 MiB in float32) on.
AUTO_LOGITS = 1 << 23

# A chunk has at least this many rows (fewer slow the matrix products down: 128 rows cost 15 % at a vocabulary
# of 151,936) and, where that is more, as many as make this number of logits (16 MiB in float32).
CHUNK_ROWS = 256
CHUNK_LOGITS = 1 << 22
# On a GPU each chunk reads and writes all of the weight's gradient. H200, 8,192 x 4,096 x 151,936, bfloat16:
# 1 << 25 takes 111 ms and 2.3 GiB, 1 << 27 73 ms and 2.4, 1 << 28 67 ms and 3.7, 1 << 29 65 ms and 6.2.
CHUNK_LOGITS_GPU = 1 << 28
# bfloat16 products added in float32 without a product of their own: 67 ms instead of 76 ms there.
ADDS_IN_FLOAT32 = "dtype_out" in torch.ops.aten.addmm.overloads()  # type: ignore[no-untyped-call]
# Leaving rows out means a copy of the rest: not worth it for the last position of each sequence.
SELECT_FROM = 1 / 8


class _Gradients(NamedTuple):
    """Scaled gradients of the summed losses; ``of_x`` belongs to ``rows`` (None: all)."""

    of_x: torch.Tensor | None
    of_weight: torch.Tensor | None
    of_bias: torch.Tensor | None
    rows: torch.Tensor | None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - what autograd.Function.apply is given
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        num_items: torch.Tensor | None,
        ignore_index: int,
        transform: Transform,
    ) -> torch.Tensor:
        ctx.dtype = _compute_dtype(x)
        ctx.ignore_index = ignore_index
        ctx.transform = transform
        items = (target != ignore_index).sum() if num_items is None else num_items
        # Where nothing counts the mean is NaN, but gradients are zero, as upstream's are.
        inverse = torch.reciprocal(items.clamp(min=1) if num_items is None else items).reshape(())
        # Scaled gradients are small numbers, which float16 would lose; only on a CPU is reading one free.
        early = x.device.type == "cpu" and ctx.dtype is not torch.float16
        scale = inverse.item() if early else 1.0
        chunks = _Chunks(ctx.dtype, ignore_index, scale, ctx.needs_input_grad[:3], transform)
        with torch.autocast(x.device.type, enabled=False):
            total, gradients = chunks.run(x, weight, bias, target)
        late = torch.ones_like(inverse) if early else inverse
        ctx.save_for_backward(x, weight, bias, target, num_items, late, *gradients)
        return total / items

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, _, _, late, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, grad), None, None, None, None)
        gradients = _Gradients(*saved)
        factor = (grad * late).reshape(())
        in_place = not torch._C._autograd._get_current_graph_task_keep_graph()
        grad_x = _scaled(gradients.of_x, factor, x.dtype, in_place=in_place)
        if grad_x is not None and gradients.rows is not None:
            grad_x = torch.zeros_like(x).index_copy_(0, gradients.rows, grad_x)
        return (
            grad_x,
            _scaled(gradients.of_weight, factor, weight.dtype, in_place=in_place),
            _scaled(gradients.of_bias, factor, None if bias is None else bias.dtype, in_place=in_place),
            None,
            None,
            None,
            None,
        )


class _Chunks:
    """One pass over the rows: the sum of losses, and their gradients times ``scale`` where ``needed``."""

    def __init__(
        self,
        dtype: torch.dtype,
        ignore_index: int,
        scale: float,
        needed: tuple[bool, bool, bool],
        transform: Transform,
    ) -> None:
        self._dtype = dtype
        self._ignore_index = ignore_index
        self._scale = scale * transform.factor
        self._needed = needed
        self._factor = transform.factor
        self._softcap = transform.softcap

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
    ) -> tuple[torch.Tensor, _Gradients]:
        """Return the sum of losses (float32) and the gradients, in the compute dtype or float32."""
        index = self._rows_that_count(target)
        if index is not None:
            x, target = x[index], target[index]
        kept = weight.dtype
        x, weight = x.to(self._dtype), weight.to(self._dtype)
        bias = None if bias is None else bias.to(self._dtype)
        for_x, for_weight, for_bias = self._needed
        logits = CHUNK_LOGITS if x.device.type == "cpu" else CHUNK_LOGITS_GPU
        size = max(CHUNK_ROWS, logits // weight.shape[0])
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x) if for_x else None
        chunks = -(-x.shape[0] // size)
        grad_weight = _WeightGradient(weight, kept, chunks, self._scale) if for_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=x.device) if for_bias else None
        for start in range(0, x.shape[0], size):
            rows = slice(start, start + size)
            loss, grad_logits = self._one(functional.linear(x[rows], weight, bias), target[rows])
            total += loss
            if grad_logits is None:
                continue
            if grad_bias is not None:
                grad_bias.add_(grad_logits.sum(dim=0), alpha=self._scale)
            low = grad_logits.to(self._dtype)
            if grad_x is not None:
                grad_x[rows].addmm_(low, weight, beta=0, alpha=self._scale)
            if grad_weight is not None:
                grad_weight.add(grad_logits, low, x[rows])
            del grad_logits, low
        return total, _Gradients(
            grad_x, None if grad_weight is None else grad_weight.result(), grad_bias, index
        )

    def _one(self, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed loss of one chunk, and (if needed) its gradient but for the scale, in float32."""
        capped = None
        if self._softcap is not None:
            capped = logits.float().mul(self._factor / self._softcap).tanh_()
            logits = capped * self._softcap
        elif self._factor != 1:
            logits = logits.float() * self._factor
        log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        loss = functional.nll_loss(log_probs, target, ignore_index=self._ignore_index, reduction="sum")
        if not any(self._needed):
            return loss, None
        probs = log_probs.exp_()
        ignored = target == self._ignore_index
        if probs.device.type == "cpu":
            probs[ignored] = 0
        else:  # the same without waiting for the number of rows
            probs.masked_fill_(ignored.unsqueeze(1), 0)
        ones = ignored.logical_not().to(probs.dtype)
        probs.scatter_add_(1, target.masked_fill(ignored, 0).unsqueeze(1), -ones.unsqueeze(1))
        return loss, probs if capped is None else probs.mul_(capped.square_().neg_().add_(1))

    def _rows_that_count(self, target: torch.Tensor) -> torch.Tensor | None:
        """Return the indices of rows with a loss if the others are worth leaving out."""
        if target.device.type != "cpu":  # elsewhere their number would have to be waited for
            return None
        index = (target != self._ignore_index).nonzero().squeeze(1)
        return index if target.numel() - index.numel() >= max(1, SELECT_FROM * target.numel()) else None


class _WeightGradient:
    """``scale`` times the sum over chunks of ``grad_logits.T @ x``, for a weight of dtype ``kept``."""

    def __init__(self, weight: torch.Tensor, kept: torch.dtype, chunks: int, scale: float) -> None:
        # float16 cannot hold sums of thousands of rows; bfloat16 can, but loses small chunks in large sums.
        low = weight.dtype
        in_float32 = low is torch.float16 or (low is torch.bfloat16 and chunks > 1)
        # A CPU without bfloat16 units is five times faster in float32; GPUs are the other way round.
        self._products = in_float32 and low is torch.bfloat16 and weight.device.type != "cpu"
        self._result = torch.float32 if low is torch.float16 or kept is torch.float32 else low
        self._scale = scale
        self._beta = 0
        dtype = torch.float32 if in_float32 else low
        self._total = torch.empty(weight.shape, dtype=dtype, device=weight.device)

    def add(self, grad_logits: torch.Tensor, low: torch.Tensor, x: torch.Tensor) -> None:
        """Add one chunk: ``grad_logits`` (float32) and its copy ``low`` belong to the rows ``x``."""
        if self._products and ADDS_IN_FLOAT32 and x.is_cuda:
            torch.addmm(
                self._total,
                low.t(),
                x,
                beta=self._beta,
                alpha=self._scale,
                out_dtype=torch.float32,
                out=self._total,
            )
        elif self._products:
            total = self._total if self._beta else self._total.zero_()
            total.add_(low.t() @ x, alpha=self._scale)
        else:
            grad = low if self._total.dtype is low.dtype else grad_logits
            self._total.addmm_(grad.t(), x.to(self._total.dtype), beta=self._beta, alpha=self._scale)
        self._beta = 1

    def result(self) -> torch.Tensor:
        """Return the gradient, in float32 where the weight's dtype would lose some of it."""
        if not self._beta:
            self._total.zero_()
        return self._total.to(self._result)


def _scaled(
    gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype | None, *, in_place: bool
) -> torch.Tensor | None:
    if gradient is None or dtype is None:
        return None
    if factor.device.type == "cpu" and factor.item() == 1:
        return gradient.to(dtype) if in_place else gradient.to(dtype, copy=True)
    if gradient.dtype is dtype and in_place:
        return gradient.mul_(factor)
    return (gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * factor).to(dtype)


def _differentiable(ctx: Any, grad: torch.Tensor) -> list[torch.Tensor | None]:
    """Return gradients that can be differentiated again, from the plain definition (all logits at once)."""
    x, weight, bias, target, num_items, *_ = ctx.saved_tensors
    loss = reference.linear_cross_entropy(
        x.to(ctx.dtype),
        weight.to(ctx.dtype),
        None if bias is None else bias.to(ctx.dtype),
        target,
        ignore_index=ctx.ignore_index,
        num_items=num_items,
        transform=ctx.transform,
    )
    needed = ctx.needs_input_grad[:3]
    inputs = [tensor for tensor, wanted in zip((x, weight, bias), needed, strict=True) if wanted]
    found = iter(torch.autograd.grad(loss, inputs, grad, create_graph=True))
    return [next(found) if wanted else None for wanted in needed]


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    num_items: torch.Tensor | float | None = None,
    transform: Transform = IDENTITY,
) -> torch.Tensor:
    """Return the mean loss over positions that count, or their sum over ``num_items``; float32.

    ``hidden_states`` is ``[rows, hidden]``, ``weight`` ``[vocab, hidden]``, ``bias`` ``[vocab]``, ``target``
    ``[rows]`` (int64). ``transform`` is applied to logits, in float32 throughout. The rows of at most one
    chunk of logits exist at a time.
    """
    items = None if num_items is None else torch.as_tensor(num_items, device=hidden_states.device)
    return _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call,no-any-return]
        hidden_states, weight, bias, target, items, ignore_index, transform
    )


def causal_lm_output(*call: Any) -> causal_lm.Fused:
    """Return a language model's loss computed here; see `causal_lm.fused_output`."""
    return causal_lm.fused_output(linear_cross_entropy, causal_lm.Call.of(*call))


def loses(
    owner: Any, hidden_states: torch.Tensor, head: Any, labels: Any, vocab_size: int, *_: Any
) -> str | None:
    """Return where upstream was measured to be faster, or None."""
    if hidden_states.device.type != "cpu":
        # H200, bfloat16, 8,192 to 32,768 rows: 0.84 to 0.96 of upstream's speed, a third to a fifteenth of
        # its memory.
        return "on a GPU it trades time for memory; choose torch by name to get that"
    if hidden_states.shape[:-1].numel() * vocab_size < AUTO_LOGITS:
        return "with so few logits upstream is as fast"
    return None

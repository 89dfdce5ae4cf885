"""Linear cross-entropy over chunks of rows, with its gradients computed in the forward.

Forward:  loss = sum_i(logsumexp(z_i) - z_i[target_i]) / items,  z = float32(x @ weight.T + bias)
Backward: dx = d @ weight, dweight = d.T @ x, dbias = sum_i(d_i),  d = (softmax(z) - onehot(target)) / items
Shapes: x [rows, hidden], weight [vocab, hidden], bias [vocab], target [rows] int64; loss float32, [] or like items.
Saved: the gradients, and x, weight, bias, target for a second derivative. Mutates: nothing.
Float32: softmax, loss, dbias, and dweight while chunks are added to it. Rows to ignore are never computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.linear_cross_entropy import causal_lm, reference

__all__ = ["causal_lm_output", "linear_cross_entropy"]

CHUNK_ROWS = 256


class _Gradients(NamedTuple):
    """Gradients of the sum of losses; ``index`` holds the rows that ``x`` belongs to (None: all)."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    index: torch.Tensor | None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        items: torch.Tensor,
        ignore_index: int,
    ) -> torch.Tensor:
        ctx.dtype = _compute_dtype(x)
        ctx.ignore_index = ignore_index
        with torch.autocast(x.device.type, enabled=False):
            total, gradients = _chunked(x, weight, bias, target, ignore_index, ctx.dtype, ctx.needs_input_grad[:3])
        ctx.save_for_backward(x, weight, bias, target, items, *gradients)
        return total / items

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, target, items, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, grad), None, None, None)
        gradients = _Gradients(*saved)
        factor = (grad / items).reshape(())
        in_place = not torch._C._autograd._get_current_graph_task_keep_graph()
        grad_x = _scaled(gradients.x, factor, x.dtype, in_place=in_place)
        if grad_x is not None and gradients.index is not None:
            grad_x = torch.zeros_like(x).index_copy_(0, gradients.index, grad_x)
        return (
            grad_x,
            _scaled(gradients.weight, factor, weight.dtype, in_place=in_place),
            _scaled(gradients.bias, factor, None if bias is None else bias.dtype, in_place=in_place),
            None,
            None,
            None,
        )


def _chunked(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    needed: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, _Gradients]:
    """Return the sum of all losses and its gradients, in ``dtype`` or float32, where ``needed``."""
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    index = None
    if x.device.type == "cpu":  # elsewhere the number of rows that count would have to be waited for
        counted = (target != ignore_index).nonzero().squeeze(1)
        if counted.numel() < target.numel():
            x, target, index = x[counted], target[counted], counted
    x, weight = x.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    for_x, for_weight, for_bias = needed
    grad_x = torch.empty_like(x) if for_x else None
    grad_weight = _WeightGradient(weight, x.shape[0]) if for_weight else None
    grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=x.device) if for_bias else None
    for start in range(0, x.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        logits = functional.linear(x[rows], weight, bias)
        log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        del logits
        total += functional.nll_loss(log_probs, target[rows], ignore_index=ignore_index, reduction="sum")
        if not any(needed):
            continue
        grad_logits = _minus_onehot(log_probs.exp_(), target[rows], ignore_index if index is None else None)
        del log_probs
        if grad_bias is not None:
            grad_bias += grad_logits.sum(dim=0)
        low = grad_logits.to(dtype)
        if grad_x is not None:
            torch.mm(low, weight, out=grad_x[rows])
        if grad_weight is not None:
            grad_weight.add(grad_logits, low, x[rows])
        del grad_logits, low
    return total, _Gradients(grad_x, grad_weight.total if grad_weight else None, grad_bias, index)


def _minus_onehot(probs: torch.Tensor, target: torch.Tensor, ignore_index: int | None) -> torch.Tensor:
    """Subtract one at each target, in place; clear rows whose target is ``ignore_index`` (None: there are none)."""
    if ignore_index is not None:
        counts = target != ignore_index
        probs.mul_(counts.unsqueeze(1))
        target = target.where(counts, 0)
        return probs.scatter_add_(1, target.unsqueeze(1), -counts.to(probs.dtype).unsqueeze(1))
    ones = torch.full((), -1.0, dtype=probs.dtype, device=probs.device).expand(target.numel(), 1)
    return probs.scatter_add_(1, target.unsqueeze(1), ones)


class _WeightGradient:
    """The sum over chunks of ``grad_logits.T @ x``: float32 while there are several, or for float16."""

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        # float16 cannot hold sums of thousands of rows; bfloat16 can, but would lose small chunks in large sums.
        low = weight.dtype in (torch.float16, torch.bfloat16)
        single = rows <= CHUNK_ROWS and weight.dtype is not torch.float16
        self._by_product = low and not single and weight.dtype is torch.bfloat16
        dtype = torch.float32 if low and not single else weight.dtype
        self.total = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        self._first = True
        if rows == 0:
            self.total.zero_()

    def add(self, grad_logits: torch.Tensor, low: torch.Tensor, x: torch.Tensor) -> None:
        """Add one chunk: ``grad_logits`` float32 and its copy ``low`` are ``[rows, vocab]``, ``x`` ``[rows, hidden]``."""
        beta = 0 if self._first else 1
        if self._by_product:
            product = low.t() @ x
            self.total = product.float() if self._first else self.total.add_(product)
        elif self.total.dtype is low.dtype:
            self.total.addmm_(low.t(), x, beta=beta)
        else:
            self.total.addmm_(grad_logits.t(), x.to(self.total.dtype), beta=beta)
        self._first = False


def _scaled(
    gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype | None, *, in_place: bool
) -> torch.Tensor | None:
    if gradient is None or dtype is None:
        return None
    # A factor rounded to bfloat16 first would shift every gradient by up to 0.4 %.
    if gradient.dtype in (torch.float32, torch.float64) and in_place:
        return gradient.mul_(factor).to(dtype)
    return (gradient * factor.to(torch.promote_types(gradient.dtype, torch.float32))).to(dtype)


def _differentiable(ctx: Any, grad: torch.Tensor) -> list[torch.Tensor | None]:
    """Return gradients that can be differentiated again, from the plain definition (all logits at once)."""
    x, weight, bias, target, items, *_ = ctx.saved_tensors
    low = [None if tensor is None else tensor.to(ctx.dtype) for tensor in (x, weight, bias)]
    loss = reference.linear_cross_entropy(*low, target, ignore_index=ctx.ignore_index, num_items=items)
    inputs = [tensor for tensor, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(loss, inputs, grad, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


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
) -> torch.Tensor:
    """Return the mean loss over positions that count, or their sum over ``num_items``; float32.

    ``hidden_states`` is ``[rows, hidden]``, ``weight`` ``[vocab, hidden]``, ``bias`` ``[vocab]``, ``target``
    ``[rows]`` (int64). At most `CHUNK_ROWS` rows of logits exist at a time.
    """
    if num_items is None:
        num_items = (target != ignore_index).sum()
    items = torch.as_tensor(num_items, device=hidden_states.device)
    return _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call,no-any-return]
        hidden_states, weight, bias, target, items, ignore_index
    )


def causal_lm_output(*call: Any) -> Any:
    """Return a causal language model's output with its loss computed here; see `causal_lm.fused_output`."""
    return causal_lm.fused_output(linear_cross_entropy, *call)

"""The load-balancing loss in Triton: all layers in one launch forward and one backward.

With ``p`` the softmax of a layer's logits (rounded to their dtype), ``k`` a row's weight in the mask (1
without) and ``R`` the sum of ``k`` over all layers' rows,

    share_e = sum(k * [e in top_k(p)]) / R,    mean_e = sum(k * p_e) / R,    loss = E * sum_e share_e * mean_e
    dlogits = k * p * (s - sum_e p_e s_e),    s = E * share / R * dloss

(Fedus et al., Switch Transformers, 2021, equations 4 to 6). Logits ``[tokens, experts]`` of every layer are
read once in each direction through a table of addresses. Sums are in float32 and deterministic: programs have
fixed rows, and there are no atomics. Saved: the logits and ``s``. Mutates: nothing. Does not synchronise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton.language as tl

from veomni_hook.kernels.load_balancing_loss import device
from veomni_hook.kernels.load_balancing_loss.row_weights import balanced, loss_of
from veomni_hook.kernels.load_balancing_loss.torch import loss as in_torch
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.launch import power, room
from veomni_hook.kernels.shared.operators import operator

__all__ = ["refuses", "softmax_topk", "softmax_topk_in_dtype"]

#: A program holds whole rows, and finds the top k one by one.
MOST_EXPERTS, MOST_TOP_K = 1024, 16
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Elements that a program holds at once, and programs per multiprocessor.
_TILE, _PROGRAMS_A_PROCESSOR = 4096, 4


def _addresses(layers: list[torch.Tensor]) -> torch.Tensor:
    """Return the addresses of ``layers`` on their device; pinned memory avoids a synchronisation."""
    addresses = [layer.data_ptr() for layer in layers]
    if not layers[0].is_cuda:
        return torch.tensor(addresses, dtype=torch.int64)
    pinned = torch.tensor(addresses, dtype=torch.int64, pin_memory=True)
    return pinned.to(layers[0].device, non_blocking=True)


def _blocks(experts: int) -> tuple[int, int]:
    block = max(16, power(experts))
    return block, max(1, _TILE // block)


@operator(lambda first, *_: first.new_empty((2, first.shape[1]), dtype=torch.float32))
def _load_balancing_sums(
    first: torch.Tensor,
    layers: list[torch.Tensor],
    kept: torch.Tensor | None,
    top_k: int,
    middle: torch.dtype,
) -> torch.Tensor:
    rows, experts = first.shape
    layers = [_readable(layer) for layer in layers]
    block, tile = _blocks(experts)
    programs = min(room(first.device)[0] * _PROGRAMS_A_PROCESSOR, max(1, len(layers) * -(-rows // tile)))
    partial = torch.empty(programs, 2, experts, dtype=torch.float32, device=first.device)
    device.forward[(programs,)](
        _addresses(layers), partial if kept is None else kept, partial, len(layers), rows, first,
        experts, top_k, block, tile, kept is not None, _TL[middle], num_warps=4,
    )  # fmt: skip
    return partial.sum(0)


@operator(lambda first, layers, *_: first.new_empty((len(layers), *first.shape)))
def _load_balancing_gradient(
    first: torch.Tensor, layers: list[torch.Tensor], kept: torch.Tensor | None, slope: torch.Tensor,
    middle: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    rows, experts = first.shape
    layers = [_readable(layer) for layer in layers]
    block, tile = _blocks(experts)
    out = torch.empty(len(layers), rows, experts, dtype=first.dtype, device=first.device)
    if out.numel():
        device.backward[(len(layers) * -(-rows // tile),)](
            _addresses(layers), slope if kept is None else kept, slope, out, rows, first,
            experts, block, tile, kept is not None, _TL[middle], num_warps=4,
        )  # fmt: skip
    return out


def _readable(layer: torch.Tensor) -> torch.Tensor:
    """Return a contiguous layer, aligned for vector loads."""
    layer = layer.contiguous()
    return layer.clone() if layer.data_ptr() % 16 else layer


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kept: torch.Tensor | None, top_k: int, middle: torch.dtype, low: torch.dtype | None,
        *layers: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        sums = _load_balancing_sums(layers[0], list(layers), kept, top_k, middle)
        loss, slope = loss_of(sums, kept, layers, low)
        ctx.save_for_backward(kept, slope, *layers)
        ctx.numbers = top_k, middle, low
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (kept, slope, *layers), wanted = ctx.saved_tensors, ctx.needs_input_grad[4:]
        if is_recorded():
            return *[None] * 4, *gradients(partial(in_torch, kept, *ctx.numbers), layers, wanted, (grad,))
        _, middle, _ = ctx.numbers
        out = _load_balancing_gradient(layers[0], layers, kept, slope * grad, middle)
        slopes = (of_layer if want else None for of_layer, want in zip(out.unbind(), wanted, strict=True))
        return *[None] * 4, *slopes


softmax_topk = partial(balanced, _Loss.apply, False)
softmax_topk_in_dtype = partial(balanced, _Loss.apply, True)


def refuses(
    owner: object, gate_logits: Any, num_experts: Any, top_k: Any, attention_mask: Any = None, *upstream: Any
) -> str | None:
    """Return what the kernel refuses, beside `row_weights`, or None."""
    if gate_logits[0].dtype not in _DTYPES:
        return f"the logits have dtype {gate_logits[0].dtype}"
    if num_experts > MOST_EXPERTS or top_k > MOST_TOP_K:
        return f"the kernel supports at most {MOST_EXPERTS} experts and a top_k of at most {MOST_TOP_K}"
    return None

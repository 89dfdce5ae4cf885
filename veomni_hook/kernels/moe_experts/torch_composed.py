"""Experts with arbitrary functions between or after the grouped products, on a CPU.

Forward:  result[token] += w * end(middle(x[token] U_e) D_e); the functions are called once for each expert
          that has tokens, with its rows, as upstream calls them
Backward: autograd's, except for the products: dx = dy W_e', dW_e = x' dy
Saved: x[token], the first product, the input of D_e, the result of each pair, and what the functions save.
Sums over k are in float32 (float64 for float64). Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts import torch_by_expert
from veomni_hook.kernels.moe_experts.forms import Form, Operands, compute_dtype, unsuited
from veomni_hook.kernels.moe_experts.torch_routing import Chunk, sorted_pairs
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operand_checks import untraceable

__all__ = ["gated_jointly", "gated_normalised", "refuses"]


def _forward(x: Tensor, weights: Tensor, chunk: Chunk, form: Form) -> Tensor:
    dtype = torch_by_expert.working(form.dtype, len(x) // len(chunk.experts))
    return torch_by_expert.product(x.to(form.dtype).to(dtype), weights, chunk, form).to(form.dtype)


def _gradients(
    saved: Sequence[Tensor], rest: tuple[Chunk, Form], wanted: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    (x, weights), (chunk, form), (to_x, to_weights) = saved, rest, wanted
    dy = dy.to(torch_by_expert.working(form.dtype, torch_by_expert.FLOAT32_ROWS))
    dx = dw = None
    with torch.autocast("cpu", enabled=False):
        if to_x:
            dx = torch_by_expert.product(dy, weights, chunk, form, back=True).to(x.dtype)
        if to_weights:
            dw = torch.zeros(weights.shape, dtype=weights.dtype)
            torch_by_expert.weight_gradient(dw, x.to(form.dtype).to(dy.dtype), dy, chunk, form)
    return dx, dw


def _definition(x: Tensor, weights: Tensor, chunk: Chunk, form: Form) -> Tensor:
    x, weights = x.to(form.dtype), weights.to(form.dtype)
    stacked = LAYOUTS[form.variant].transposed
    return torch.cat([x[rows] @ (weights[e] if stacked else weights[e].t()) for e, rows in chunk.experts])


_product: Callable[..., Tensor] = differentiable(_forward, _gradients, _definition, tensors=2)


def gated_jointly(*operands: Any) -> Tensor:
    """Compute `reference.gated_jointly` from its operands."""
    *tensors, act_fn = operands
    return _experts(tensors, lambda both: act_fn(*both.chunk(2, dim=-1)), None)


def gated_normalised(*operands: Any) -> Tensor:
    """Compute `reference.gated_normalised` from its operands."""
    *tensors, act_fn, norm = operands

    def middle(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return act_fn(gate) * up  # type: ignore[no-any-return]

    return _experts(tensors, middle, norm)


def _experts(
    tensors: list[Any], middle: Callable[[Tensor], Tensor], end: Callable[[Tensor], Tensor] | None
) -> Tensor:
    x, index, weights, up, down = tensors
    operands = Operands(x, index, weights, up, None, down, None)
    form = Form("gated", "", 0.0, 0.0, compute_dtype("gated", operands))
    result = x.new_zeros(x.shape, dtype=torch.promote_types(form.dtype, torch.float32))
    pairs = sorted_pairs(index, up.shape[0])
    for chunk in pairs.chunks(index.numel()):  # at most one
        token = chunk.places // pairs.top_k
        rows = _each(middle, _multiplied(x.index_select(0, token), up, chunk, form), chunk)
        rows = _multiplied(rows, down, chunk, form)
        rows = rows if end is None else _each(end, rows, chunk)
        rows = rows * weights.reshape(-1)[chunk.places, None]
        result = result.index_add(0, token, rows.to(result.dtype))
    return result.to(x.dtype)  # type: ignore[no-any-return]


def _multiplied(x: Tensor, weights: Tensor, chunk: Chunk, form: Form) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return _product(x, weights, chunk, form)


def _each(function: Callable[[Tensor], Tensor], rows: Tensor, chunk: Chunk) -> Tensor:
    return torch.cat([function(rows[part]) for _, part in chunk.experts])


def refuses(owner: Any, *operands: Any) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run, or None."""
    x, index, weights, up, down = operands[:5]
    return unsuited(Operands(x, index, weights, up, None, down, None)) or untraceable()

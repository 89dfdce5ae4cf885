"""Experts with arbitrary functions between or after the grouped products, on a CPU.

Forward:  result[token] += w * end(middle(x[token] U_e + u_e) D_e + d_e); the functions are called once for
          each expert that has tokens, with its rows, as upstream calls them
Backward: autograd's, except for the products: dx = dy W_e', dW_e = x' dy
Saved: x[token], the first product, the input of D_e, the result of each pair, and what the functions save.
Sums over k are in float32 (float64 for float64). Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts import reference, torch_by_expert
from veomni_hook.kernels.moe_experts.forms import Form, compute_dtype, taken_apart, unsuited
from veomni_hook.kernels.moe_experts.torch_routing import Chunk, sorted_pairs
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operand_checks import untraceable

__all__ = ["kernel", "refuses"]


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


def kernel(variant: str) -> Callable[..., Tensor]:
    """Return the kernel of a layout, which takes the operands of its reference."""
    return partial(_experts, variant)


def _experts(variant: str, *operands: object) -> Tensor:
    tensors, rest = taken_apart(operands)
    x, index, weights, up, up_bias, down, down_bias = tensors
    layout = LAYOUTS[variant]
    known = {"act_fn": None, "alpha": 0.0, "limit": 0.0, **dict(zip(layout.rest, rest, strict=False))}
    middle = partial(reference.gate, layout=layout, **known)
    form = Form(variant, "", 0.0, 0.0, compute_dtype(variant, tensors))
    result = x.new_zeros(x.shape, dtype=torch.promote_types(form.dtype, torch.float32))
    pairs = sorted_pairs(index, up.shape[0])
    for chunk in pairs.chunks(index.numel()):  # at most one
        token = chunk.places // pairs.top_k
        rows = _each(middle, _multiplied(x.index_select(0, token), up, chunk, form), up_bias, chunk)
        rows = _multiplied(rows, down, chunk, form)
        if layout.normalised or down_bias is not None:
            rows = _each(rest[-1] if layout.normalised else torch.clone, rows, down_bias, chunk)
        rows = rows * weights.reshape(-1)[chunk.places, None]
        result = result.index_add(0, token, rows.to(result.dtype))
    return result.to(x.dtype)


def _multiplied(x: Tensor, weights: Tensor, chunk: Chunk, form: Form) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return _product(x, weights, chunk, form)


def _each(function: Callable[[Tensor], Tensor], rows: Tensor, bias: Tensor | None, chunk: Chunk) -> Tensor:
    """The function of each expert's rows and its bias."""
    found = [function(rows[part] if bias is None else rows[part] + bias[e]) for e, part in chunk.experts]
    return torch.cat(found)


def refuses(owner: object, *operands: object) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run, or None."""
    return unsuited(taken_apart(operands)[0]) or untraceable()

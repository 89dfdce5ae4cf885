"""Experts in plain PyTorch: pairs sorted by expert, and one product of matrices for all rows of an expert.

Forward:  z = x[token] U_e + u_e;  y = gate(z);  result[token] += w * (y D_e + d_e)
Backward: dy = w * g D_e';  dz = gate'(z) dy;  dx[token] += dz U_e';  dw = <g D_e', y> + <g, d_e>
          dU_e = x[token]' dz;  dD_e = y' (w * g), where g = grad[token]; dw needs no result of D_e
Shapes: `forms.Operands`; a row for each of the tokens * k pairs. Sums over k and over tokens are in float32
(float64 for float64), in a fixed order: two runs give the same bits. Saved: the operands and z, in the dtype
of the products. Mutates: nothing. On a CPU one expert after the other (`torch_by_expert`), elsewhere in
products for all experts at once (`torch_grouped`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_hook.kernels.modules import call_is_seen
from veomni_hook.kernels.moe_experts import forms, torch_by_expert, torch_grouped
from veomni_hook.kernels.moe_experts.autograd import Backend, Gradients, Needed, experts
from veomni_hook.kernels.moe_experts.forms import Form, Operands, kept_dtype, kept_shape
from veomni_hook.kernels.operands import not_plain, untraceable
from veomni_hook.kernels.operators import define_op

__all__ = [
    "alpha_gated",
    "biased_alpha_gated_float32",
    "biased_interleaved_alpha_gated",
    "gated",
    "gated_clamped",
    "gated_clamped_after",
    "gated_float32_product",
    "gated_or_identity",
    "gated_transposed",
    "loses",
    "refuses",
    "refuses_or_identity",
    "ungated",
]

# Against transformers' grouped_mm under torch 2.13, one thread, float32, forward and step: 64 experts of
# 1,536 x 2,048 with 256 rows each 1.22 and 1.15 times as fast, with 32 rows 1.02 and 0.94, with fewer 0.95;
# 32 of 512 x 512 with 256 rows 1.36 and 1.01, with 64 rows 0.91 and 1.06; 16 of 256 x 256 with 128 rows 0.92
# and 0.84. In bfloat16 the latter two are 2.1 times as fast.
FEW_ROWS, SMALL_EXPERT = 128, 1 << 18
# Against upstream's loop: 0.76 with 2 rows of 64 x 64, 1.1 with 1,024 of them.
FEW_NUMBERS = 1 << 20

_FORM = "str variant, str activation, float limit, float alpha, ScalarType dtype"
_OPERANDS = (
    "Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, Tensor up, Tensor? up_bias, Tensor down,"
    " Tensor? down_bias"
)


def _forward_op(*call: Any) -> tuple[Tensor, Tensor]:
    *tensors, variant, activation, limit, alpha, dtype, keep = call
    home = torch_by_expert if tensors[0].device.type == "cpu" else torch_grouped
    form = Form(variant, activation, limit, alpha, dtype)
    found: tuple[Tensor, Tensor] = home.forward(Operands(*tensors), form, keep=keep)
    return found


def _forward_fake(*call: Any) -> tuple[Tensor, Tensor]:
    *tensors, variant, activation, limit, alpha, dtype, keep = call
    operands, form = Operands(*tensors), Form(variant, activation, limit, alpha, dtype)
    x = operands.hidden_states
    kept = x.new_empty(kept_shape(operands, form, keep=keep), dtype=kept_dtype(operands, form))
    return x.new_empty(x.shape), kept


def _backward_op(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    *tensors, kept, variant, activation, limit, alpha, dtype, needed = call
    home = torch_by_expert if grad.device.type == "cpu" else torch_grouped
    form = Form(variant, activation, limit, alpha, dtype)
    found = home.backward(grad, Operands(*tensors), kept, form, Needed(*needed))
    return tuple(grad.new_empty(0) if each is None else each for each in found)


def _backward_fake(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    *tensors, _, _, _, _, _, dtype, needed = call
    operands = Operands(*tensors)
    total = torch.promote_types(dtype, torch.float32)
    of = (operands.hidden_states, *operands[2:])
    held = (total, total, *(None if each is None else each.dtype for each in operands[3:]))
    return tuple(
        x.new_empty(x.shape, dtype=kind) if want and x is not None else grad.new_empty(0)
        for x, kind, want in zip(of, held, needed, strict=True)
    )


_FORWARD = define_op(
    f"moe_experts_torch({_OPERANDS}, {_FORM}, bool keep) -> (Tensor, Tensor)", _forward_op, _forward_fake
)
_BACKWARD = define_op(
    f"moe_experts_torch_backward(Tensor grad, {_OPERANDS}, Tensor kept, {_FORM}, bool[] needed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)


def _forward(operands: Operands, form: Form, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    result, kept = _FORWARD(*operands, *form, keep)
    return result, (kept,)


def _backward(
    grad: Tensor, operands: Operands, kept: tuple[Tensor, ...], form: Form, needed: Needed
) -> Gradients:
    return Gradients(*_BACKWARD(grad, *operands, *kept, *form, list(needed)))


_BACKEND = Backend(_forward, _backward)

#: Called with the operands of the function of the same name in `reference`.
gated = partial(experts, _BACKEND, "gated")
gated_clamped = partial(experts, _BACKEND, "gated_clamped")
gated_clamped_after = partial(experts, _BACKEND, "gated_clamped_after")
gated_float32_product = partial(experts, _BACKEND, "gated_float32_product")
gated_transposed = partial(experts, _BACKEND, "gated_transposed")
alpha_gated = partial(experts, _BACKEND, "alpha_gated")
biased_interleaved_alpha_gated = partial(experts, _BACKEND, "biased_interleaved_alpha_gated")
biased_alpha_gated_float32 = partial(experts, _BACKEND, "biased_alpha_gated_float32")
ungated = partial(experts, _BACKEND, "ungated")


def gated_or_identity(  # noqa: PLR0913, PLR0917 - the operands of a kernel
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor | None,
    down_proj: Tensor | None,
    act_fn: Any,
    num_experts: int,
    identity: Any = None,
) -> Tensor:
    """`gated` for ids below ``num_experts``; every other id is an expert that returns what it gets."""
    own = gate_up_proj is not None and down_proj is not None
    past = top_k_index >= (num_experts if own else 0)
    share = torch.where(past, top_k_weights, 0).sum(-1, keepdim=True)
    same = (hidden_states * share).to(hidden_states.dtype)
    if gate_up_proj is None or down_proj is None:
        return same
    stacked = gate_up_proj[:num_experts], down_proj[:num_experts]
    return same + gated(hidden_states, top_k_index, top_k_weights, *stacked, act_fn)


def refuses(owner: Any, *operands: Any) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run, or None."""
    return forms.refuses(owner, *operands) or torch_grouped.unable(forms.taken_apart(operands)[0])


def refuses_or_identity(owner: Any, *operands: Any) -> str | None:
    """`refuses` of `gated_or_identity`."""
    *tensors, activation, num_experts = operands[:7]
    if len(operands) > 7 and operands[7] is not None and (seen := call_is_seen(operands[7])) is not None:
        return f"the identity {seen}"
    if tensors[3] is None or tensors[4] is None:
        return not_plain(*tensors[:3]) or untraceable()
    if type(num_experts) is not int or num_experts > min(len(tensors[3]), len(tensors[4])):
        return f"num_experts is {num_experts!r}"
    stacked = (each[:num_experts].detach() for each in tensors[3:])
    return refuses(owner, *tensors[:3], *stacked, activation)


def loses(
    owner: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, up: Tensor | None, *_: Any
) -> str | None:
    """Return where upstream was measured to be as fast, or was not measured, or None."""
    if hidden_states.device.type != "cpu":
        return "it was not measured on this kind of device; choose torch by name to have it"
    if up is None:
        return "there is nothing to multiply"
    size, pairs = up.shape[1] * up.shape[2], top_k_index.numel()
    config = getattr(owner, "config", None)
    if getattr(config, "_experts_implementation", None) != "grouped_mm":
        return "with so little to multiply upstream's loop is as fast" if size * pairs < FEW_NUMBERS else None
    if pairs < FEW_ROWS * up.shape[0]:
        return "with so few tokens for each expert upstream's grouped_mm is as fast"
    if hidden_states.dtype.itemsize > 2 and size < SMALL_EXPERT:
        return "with experts so small upstream's grouped_mm is as fast"
    return None

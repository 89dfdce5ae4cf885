"""Experts in plain PyTorch: pairs are sorted by expert, with one matrix product for all rows of an expert.

Forward:  z = x[token] U_e + u_e;  y = gate(z);  result[token] += w * (y D_e + d_e)
Backward: dy = w * g D_e';  dz = gate'(z) dy;  dx[token] += dz U_e';  dw = <g D_e', y> + <g, d_e>
          dU_e = x[token]' dz;  dD_e = y' (w * g), where g = grad[token]; dw needs no result of D_e
Shapes: `forms.Operands`; one row for each of the tokens * k pairs. Sums over k and over tokens are in float32
(float64 for float64), in a fixed order, so results are deterministic. Saved: the operands and z, in the dtype
of the products. Mutates: nothing. On a CPU one expert after the other (`torch_by_expert`), elsewhere all
experts in one product (`torch_grouped`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from veomni_hook.kernels.moe_experts import forms, torch_by_expert, torch_grouped
from veomni_hook.kernels.moe_experts.autograd import kernel_of
from veomni_hook.kernels.moe_experts.forms import Form, Operands, kept_dtype, kept_shape
from veomni_hook.kernels.moe_experts.identity import experts_or_identity, identity_refuses
from veomni_hook.kernels.moe_experts.low_rank import AdaptedWeight, Adapters, is_adapted, without_adapters
from veomni_hook.kernels.moe_experts.operators import Gradients, Needed, define_backend
from veomni_hook.kernels.moe_experts.provenance import chose_ours

__all__ = ["gated_or_identity", "in_float8", "kernel", "loses", "refuses", "refuses_or_identity"]

# Against transformers' grouped_mm under torch 2.13, one thread, float32, forward and step: 64 experts of
# 1,536 x 2,048 with 256 rows each 1.22 and 1.15 times as fast, with 32 rows 1.02 and 0.94, with fewer 0.95;
# 32 of 512 x 512 with 256 rows 1.36 and 1.01, with 64 rows 0.91 and 1.06; 16 of 256 x 256 with 128 rows 0.92
# and 0.84. In bfloat16 the latter two are 2.1 times as fast.
FEW_ROWS, SMALL_EXPERT = 128, 1 << 18
# Against upstream's loop: 0.76 with 2 rows of 64 x 64, 1.1 with 1,024 of them.
FEW_NUMBERS = 1 << 20


def _forward(operands: Operands, adapters: Adapters, form: Form, *, keep: bool) -> tuple[Tensor, Tensor]:
    home = torch_by_expert if operands.hidden_states.device.type == "cpu" else torch_grouped
    result: tuple[Tensor, Tensor] = home.forward(operands, adapters, form, keep=keep)
    return result


def _backward(
    grad: Tensor,
    operands: Operands,
    adapters: Adapters,
    kept: Sequence[Tensor],
    form: Form,
    needed: Needed,
    *,
    spend: bool,  # unused: the saved tensors are only read
) -> Gradients:
    home = torch_by_expert if grad.device.type == "cpu" else torch_grouped
    gradients: Gradients = home.backward(grad, operands, adapters, kept[0], form, needed)
    return gradients


def _like_kept(operands: Operands, adapters: Adapters, form: Form, *, keep: bool) -> tuple[Tensor]:
    shape = kept_shape(operands, form, keep=keep)
    return (operands.hidden_states.new_empty(shape, dtype=kept_dtype(operands, form)),)


_BACKEND = define_backend("moe_experts_torch", _forward, _backward, _like_kept, kept_adapted=1)

kernel = partial(kernel_of, _BACKEND)
in_float8 = partial(kernel_of, _BACKEND, float8=True)


def refuses(owner: object, *operands: object) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run, or None."""
    if is_adapted(operands):
        operands = (*without_adapters(operands),)
    return forms.refuses(owner, *operands) or torch_grouped.unable(forms.taken_apart(operands)[0])


gated_or_identity = partial(experts_or_identity, kernel("gated"))
refuses_or_identity = partial(identity_refuses, refuses)


def loses(  # noqa: PLR0911 - one return a reason
    owner: object,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor | None,
    *_: object,
) -> str | None:
    """Return why upstream is preferred (measured to be as fast, or not measured), or None."""
    if chose_ours(owner):
        return None
    if hidden_states.device.type != "cpu":
        return "it was not measured on this device type; choose torch by name to use it"
    if up is None:
        return "there are no weights"
    if type(up) is AdaptedWeight:
        return None  # upstream would form the sum of all weights and adapters first
    size, pairs = up.shape[1] * up.shape[2], top_k_index.numel()
    config = getattr(owner, "config", None)
    if getattr(config, "_experts_implementation", None) != "grouped_mm":
        return "with so few numbers, upstream's loop is as fast" if size * pairs < FEW_NUMBERS else None
    if pairs < FEW_ROWS * up.shape[0]:
        return "with so few tokens for each expert, upstream's grouped_mm is as fast"
    if hidden_states.dtype.itemsize > 2 and size < SMALL_EXPERT:
        return "with such small experts, upstream's grouped_mm is as fast"
    return None

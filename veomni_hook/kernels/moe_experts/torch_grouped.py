"""All experts in one product, for a GPU: ``torch._grouped_mm`` over pairs sorted by expert.

`torch` has the formulas. Nothing synchronises. Rows of pairs without an expert are at the ends of the sorted
order: products do not touch them, and they are masked before any sum. Sums over k run over a token's places
in order, without atomics. Negative ids are not checked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts import torch_gating
from veomni_hook.kernels.moe_experts.forms import Form, Operands, compute_dtype, kept_dtype
from veomni_hook.kernels.moe_experts.low_rank import Adapters, Factors, padded
from veomni_hook.kernels.moe_experts.operators import Gradients, Needed
from veomni_hook.kernels.moe_experts.torch_routing import Pairs, sorted_pairs
from veomni_hook.kernels.moe_experts.variants import LAYOUTS

__all__ = ["backward", "forward", "unable"]

# torch._grouped_mm needs addresses and rows to be multiples of this.
ALIGNED_BYTES = 16


def unable(operands: Operands) -> str | None:
    """Return why this cannot be computed on the device of the operands, or None."""
    x, _, _, up, _, down, _ = operands
    if x.device.type == "cpu":
        return None
    if not hasattr(torch, "_grouped_mm"):
        return "this torch release has no torch._grouped_mm"
    dtype = compute_dtype("gated", operands)
    if dtype is not torch.bfloat16:
        return f"the kernel multiplies in bfloat16, not {dtype}"
    if any(size * dtype.itemsize % ALIGNED_BYTES for size in (*up.shape[1:], *down.shape[1:])):
        return f"rows of weights {[*up.shape]}, {[*down.shape]} are not multiples of {ALIGNED_BYTES} bytes"
    return None


def forward(operands: Operands, adapters: Adapters, form: Form, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the result and, if ``keep``, the first product of all pairs, sorted by expert."""
    x, index, weights, up, up_bias, down, down_bias = operands
    rows = _Rows(sorted_pairs(index, up.shape[0]))
    inputs = x.index_select(0, rows.token).to(form.dtype)
    z = rows.adapted(rows.product(inputs, _matrices(up, form)), inputs, adapters.up, form)
    z = rows.biased(z, up_bias, kept_dtype(operands, form))
    h = torch_gating.forward(z, form).to(form.dtype)
    y = rows.adapted(rows.product(h, _matrices(down, form)), h, adapters.down, form)
    y = rows.biased(y, down_bias, kept_dtype(operands, form))
    result = rows.of_tokens(y, index.shape, weights)
    return result.to(x.dtype), z if keep else z.new_empty(0, z.shape[1])


def backward(
    grad: Tensor,
    operands: Operands,
    adapters: Adapters,
    kept: Tensor,
    form: Form,
    needed: Needed,
) -> Gradients:
    """Return the ``needed`` gradients."""
    x, index, weights, up, _, down, down_bias = operands
    rows = _Rows(sorted_pairs(index, up.shape[0]))
    share = weights.reshape(-1, 1).index_select(0, rows.pairs.order)
    g = grad.index_select(0, rows.token).to(form.dtype)
    dy = rows.product(g, _matrices(down, form).transpose(1, 2))
    dy = rows.adapted(dy, g, adapters.down, form, back=True)
    y, dz = torch_gating.backward(kept, (dy * share).to(kept.dtype), form)
    to_weights = to_x = None
    if needed.top_k_weights:
        dw = (dy.float() * y).sum(-1, keepdim=True)
        if down_bias is not None:
            dw = dw + (g.float() * down_bias.index_select(0, rows.expert)).sum(-1, keepdim=True)
        to_weights = rows.in_place(dw).view(weights.shape)
    scaled, dz, y = (g * share).to(form.dtype), dz.to(form.dtype), y.to(form.dtype)
    if needed.hidden_states:
        dx = rows.product(dz, _matrices(up, form).transpose(1, 2))
        dx = rows.adapted(dx, dz, adapters.up, form, back=True)
        to_x = rows.of_tokens(dx, index.shape, None)
    to_up = to_up_factors = to_down_factors = None
    if needed.up or adapters.up is not None:
        inputs = x.index_select(0, rows.token).to(form.dtype)
        to_up = rows.gradient(inputs, dz, form) if needed.up else None
        to_up_factors = rows.adapter_gradients(inputs, dz, adapters.up, form)
    to_down_factors = rows.adapter_gradients(y, scaled, adapters.down, form)
    return Gradients(
        to_x,
        to_weights,
        to_up,
        rows.sums(dz) if needed.up_bias else None,
        rows.gradient(y, scaled, form) if needed.down else None,
        rows.sums(scaled) if needed.down_bias else None,
        *(to_up_factors or (None, None)),
        *to_down_factors,
    )


def _aligned(factors: Factors, form: Form) -> tuple[Tensor, Tensor]:
    """The factors ``into`` and ``out``, of a rank that can be multiplied."""
    return padded(factors, form.dtype, ALIGNED_BYTES // form.dtype.itemsize)


def _matrices(weights: Tensor, form: Form) -> Tensor:
    """The weights of all experts, ``[E, in, out]``."""
    weights = weights.to(form.dtype)
    return weights if LAYOUTS[form.variant].transposed else weights.transpose(1, 2)


class _Rows:
    """Rows of pairs sorted by expert, and operations on all of them at once."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.token = pairs.order // pairs.top_k
        self._ends = pairs.starts[1:].to(torch.int32)
        number = torch.arange(len(pairs.order), device=pairs.order.device)
        self._held = (number < pairs.starts[-1])[:, None]
        experts = len(pairs.starts) - 1
        self.expert = torch.searchsorted(pairs.starts[1:], number, right=True).clamp(max=experts - 1)
        # The row of each place.
        self._inverse = torch.empty_like(number).scatter_(0, pairs.order, number)

    def product(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Each row times its expert's matrix; undefined for rows without an expert."""
        output: Tensor = torch._grouped_mm(x, matrices, offs=self._ends)
        return output

    def adapted(
        self, y: Tensor, x: Tensor, factors: Factors | None, form: Form, *, back: bool = False
    ) -> Tensor:
        """Add what an adapter makes of the rows ``x`` to ``y`` (``back``: from outputs to inputs)."""
        if factors is None:
            return y
        into, out = _aligned(factors, form)
        left, right = (out, into) if back else (into.transpose(1, 2), out.transpose(1, 2))
        return y + self.product((self.product(x, left) * factors.scale).to(x.dtype), right)

    def adapter_gradients(
        self, x: Tensor, dy: Tensor, factors: Factors | None, form: Form
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of an adapter, from its product's input and the gradient of its output."""
        if factors is None:
            return None, None
        into, out = _aligned(factors, form)
        rank = factors.into.shape[1]
        low = (self.product(x, into.transpose(1, 2)) * factors.scale).to(x.dtype)
        back = (self.product(dy, out) * factors.scale).to(x.dtype)
        return (
            self._gradient(back, x)[:, :rank].contiguous(),
            self._gradient(dy, low)[..., :rank].contiguous(),
        )

    def biased(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Add each row's expert's bias, in ``dtype``."""
        return x.to(dtype) if bias is None else x.to(dtype) + bias.index_select(0, self.expert).to(dtype)

    def in_place(self, x: Tensor) -> Tensor:
        """Rows in the order of places, ``[tokens * k, ...]``; 0 for places without an expert."""
        return x.masked_fill(~self._held, 0).index_select(0, self._inverse)

    def of_tokens(self, x: Tensor, shape: torch.Size, weights: Tensor | None) -> Tensor:
        """The sum over k, ``[tokens, ...]``, in float32."""
        rows = self.in_place(x).view(*shape, -1).float()
        return (rows if weights is None else rows * weights[..., None]).sum(1)

    def gradient(self, inputs: Tensor, outputs: Tensor, form: Form) -> Tensor:
        """The gradient of stacked weights, from inputs and gradients of outputs of their product."""
        left, right = (inputs, outputs) if LAYOUTS[form.variant].transposed else (outputs, inputs)
        return self._gradient(left, right)

    def _gradient(self, left: Tensor, right: Tensor) -> Tensor:
        gradient: Tensor = torch._grouped_mm(left.t(), right, offs=self._ends)
        return gradient

    def sums(self, x: Tensor) -> Tensor:
        """The sum of each expert's rows, ``[E, columns]``: a product with ones."""
        ones = x.new_ones(len(x), ALIGNED_BYTES // x.element_size())
        column_sums: Tensor = torch._grouped_mm(x.t(), ones, offs=self._ends)
        return column_sums[..., 0]

"""Computes experts one after the other, for a CPU; `torch` has the formulas.

Rows of tokens are gathered for one expert at a time, or for several experts with few rows, so that rows and
intermediate results stay in the cache. Only the first product exists for all pairs at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from veomni_hook.kernels.float8 import reference as float8
from veomni_hook.kernels.moe_experts import torch_gating
from veomni_hook.kernels.moe_experts.forms import Form, Operands, kept_dtype, kept_shape
from veomni_hook.kernels.moe_experts.low_rank import Adapters, Factors
from veomni_hook.kernels.moe_experts.operators import Gradients, Needed
from veomni_hook.kernels.moe_experts.torch_routing import Chunk, Pairs, sorted_pairs
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.selection.process_choice import STATE

__all__ = ["backward", "forward", "product", "weight_gradient", "working"]

# Steps other than products run on at least this many rows: run separately for 27 experts with one row each,
# they take a fifth of the time.
CHUNK_ROWS = 256
# 16-bit products are slow on a CPU without 16-bit units. 2,048 x 1,536 on AVX-512, bfloat16 against a cast of
# the weight and a float32 product, in ms: 8 and 10 for 4 rows, 16 and 15 for 32, 70 and 27 for 256;
# backward, float16: 75 and 12 for 4 rows, 3,400 and 25 for 256.
FLOAT32_ROWS = 32


def forward(operands: Operands, adapters: Adapters, form: Form, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the result and, if ``keep``, the first product of all pairs, sorted by expert."""
    x, index, weights, up, up_bias, down, down_bias = operands
    pairs = sorted_pairs(index, up.shape[0])
    result = x.new_zeros(x.shape, dtype=torch.promote_types(form.dtype, torch.float32))
    kept = x.new_empty(kept_shape(operands, form, keep=keep), dtype=kept_dtype(operands, form))
    if keep:
        mask = pairs.held()
        kept[: mask.start].zero_()
        kept[mask.stop :].zero_()
    weights = weights.reshape(-1).to(result.dtype)
    for chunk in pairs.chunks(CHUNK_ROWS):
        token = chunk.places // pairs.top_k
        dtype = working(form.dtype, len(token) // len(chunk.experts))
        rows = x.index_select(0, token).to(form.dtype).to(dtype)
        z = _adapted(product(rows, up, chunk, form), rows, adapters.up, chunk, form)
        # Round as upstream's operators do: the gradient of values at a limit depends on it.
        z = _biased(z.to(form.dtype).to(kept.dtype), up_bias, chunk)
        if keep:
            kept[chunk.rows] = z
        rows = torch_gating.forward(z, form).to(dtype)
        y = _adapted(product(rows, down, chunk, form), rows, adapters.down, chunk, form)
        y = _biased(y.to(result.dtype), down_bias, chunk)
        result.index_add_(0, token, y.mul_(weights[chunk.places, None]))
    return result.to(x.dtype), kept


def backward(
    grad: Tensor,
    operands: Operands,
    adapters: Adapters,
    kept: Tensor,
    form: Form,
    needed: Needed,
) -> Gradients:
    """Return the ``needed`` gradients; experts without tokens get zeros."""
    x, index, weights, up, _, down, down_bias = operands
    pairs = sorted_pairs(index, up.shape[0])
    dtype = working(form.dtype, FLOAT32_ROWS)
    gradients = _empty(operands, adapters, needed, pairs, torch.promote_types(form.dtype, torch.float32))
    weights = weights.reshape(-1).to(dtype)
    for chunk in pairs.chunks(CHUNK_ROWS):
        token, share = chunk.places // pairs.top_k, weights[chunk.places, None]
        g = grad.index_select(0, token).to(dtype)
        dy = product(g, down, chunk, form, back=True)
        dy = _adapted(dy, g, adapters.down, chunk, form, back=True)
        y, dz = torch_gating.backward(kept[chunk.rows], (dy * share).to(kept.dtype), form)
        y, dz = y.to(dtype), dz.to(dtype)
        if gradients.top_k_weights is not None:
            if down_bias is not None:
                extra = _biased(torch.zeros_like(g), down_bias, chunk).mul_(g).sum(-1)
            dw = (dy * y).sum(-1)
            dw = dw if down_bias is None else dw + extra
            gradients.top_k_weights.view(-1)[chunk.places] = dw.to(gradients.top_k_weights.dtype)
        if gradients.down is not None:
            weight_gradient(gradients.down, *_as_float8(y * share, g, chunk, form), chunk, form)
        if gradients.down_bias is not None:
            _sums(gradients.down_bias, g * share, chunk)
        _adapter_gradients(gradients[8:], y, g * share, adapters.down, chunk, form)
        if gradients.up is not None or adapters.up is not None:
            rows = x.index_select(0, token).to(form.dtype).to(dtype)
            if gradients.up is not None:
                outputs, inputs = _as_float8(dz, rows, chunk, form)
                weight_gradient(gradients.up, inputs, outputs, chunk, form)
            _adapter_gradients(gradients[6:8], rows, dz, adapters.up, chunk, form)
        if gradients.up_bias is not None:
            _sums(gradients.up_bias, dz, chunk)
        if gradients.hidden_states is not None:
            dx = product(dz, up, chunk, form, back=True)
            dx = _adapted(dx, dz, adapters.up, chunk, form, back=True)
            gradients.hidden_states.index_add_(0, token, dx.to(gradients.hidden_states.dtype))
    return gradients


def working(dtype: torch.dtype, rows: int) -> torch.dtype:
    """Return the dtype in which to compute products of ``dtype`` with about ``rows`` rows per expert."""
    widens = rows >= FLOAT32_ROWS or STATE.choice.invariant
    return torch.float32 if dtype.itemsize == 2 and widens else dtype


def product(x: Tensor, weights: Tensor, chunk: Chunk, form: Form, *, back: bool = False) -> Tensor:
    """Return rows times their experts' matrices (``back``: from outputs to inputs), in their dtype."""
    turned = LAYOUTS[form.variant].transposed is back
    output = x.new_empty(len(x), weights.shape[1 if turned else 2])
    for expert, rows in chunk.experts:
        if form.float8:
            matrix = weights[expert] if turned else weights[expert].t()
            left, right = (float8.quantised(factor, mx=form.mx) for factor in (x[rows], matrix))
            output[rows] = float8.product(left, right, x.dtype)
        else:
            # Round to autocast's dtype, even if the product has a higher precision.
            weight = weights[expert].to(form.dtype).to(x.dtype)
            torch.mm(x[rows], weight.t() if turned else weight, out=output[rows])
    return output


def weight_gradient(gradient: Tensor, inputs: Tensor, outputs: Tensor, chunk: Chunk, form: Form) -> None:
    """Write the gradients of experts' weights, from their ``inputs`` and gradients of their ``outputs``."""
    left, right = (inputs, outputs) if LAYOUTS[form.variant].transposed else (outputs, inputs)
    for expert, rows in chunk.experts:
        if gradient.dtype is left.dtype:
            torch.mm(left[rows].t(), right[rows], out=gradient[expert])
        else:
            gradient[expert] = left[rows].t() @ right[rows]


def _as_float8(wide: Tensor, rows: Tensor, chunk: Chunk, form: Form) -> tuple[Tensor, Tensor]:
    """Return the factors of a weight's gradient: in float8 ``s wide`` and q, where ``rows = s q``."""
    if not form.float8:
        return wide, rows
    if form.mx:
        return _columns_in_mx(wide, chunk), _columns_in_mx(rows, chunk)
    values, factors = float8.quantised(rows)
    wide = wide * factors.to(wide.dtype)
    for _, part in chunk.experts:
        columns, scales = float8.quantised(wide[part].t())
        wide[part] = (columns.to(wide.dtype) * scales.to(wide.dtype)).t()
    return wide, values.to(rows.dtype)


def _columns_in_mx(x: Tensor, chunk: Chunk) -> Tensor:
    cast = torch.empty_like(x)
    for _, part in chunk.experts:
        cast[part] = float8.dequantised(*float8.quantised(x[part].t(), mx=True)).t()
    return cast


def _adapted(
    y: Tensor, x: Tensor, factors: Factors | None, chunk: Chunk, form: Form, *, back: bool = False
) -> Tensor:
    """Add what an adapter makes of the rows ``x`` to ``y``, in place (``back``: from outputs to inputs)."""
    if factors is None:
        return y
    for expert, rows in chunk.experts:
        into, out = _cast(factors, expert, form, x.dtype)
        left, right = (out, into.t()) if back else (into.t(), out)
        y[rows] += (x[rows] @ left * factors.scale) @ right.t()
    return y


def _adapter_gradients(
    gradients: Sequence[Tensor | None],
    x: Tensor,
    dy: Tensor,
    factors: Factors | None,
    chunk: Chunk,
    form: Form,
) -> None:
    """Write the gradients of an adapter, from its product's input and the gradient of its output."""
    if factors is None:
        return
    to_into, to_out = gradients
    for expert, rows in chunk.experts:
        into, out = _cast(factors, expert, form, x.dtype)
        if to_into is not None:
            to_into[expert] = (dy[rows] @ out * factors.scale).t() @ x[rows]
        if to_out is not None:
            to_out[expert] = dy[rows].t() @ (x[rows] @ into.t() * factors.scale)


def _cast(factors: Factors, expert: int, form: Form, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # Round to autocast's dtype, even if the product has a higher precision.
    return factors.into[expert].to(form.dtype).to(dtype), factors.out[expert].to(form.dtype).to(dtype)


def _biased(x: Tensor, bias: Tensor | None, chunk: Chunk) -> Tensor:
    """Add experts' biases to their rows, in place."""
    if bias is not None:
        for expert, rows in chunk.experts:
            x[rows] += bias[expert].to(x.dtype)
    return x


def _sums(gradient: Tensor, x: Tensor, chunk: Chunk) -> None:
    for expert, rows in chunk.experts:
        gradient[expert] = x[rows].sum(0)


def _empty(
    operands: Operands, adapters: Adapters, needed: Needed, pairs: Pairs, total: torch.dtype
) -> Gradients:
    """Allocate the gradients; of stacked ones, only parts that no expert writes are zeroed."""
    x, _, weights, *stacked = operands
    idle = (pairs.starts.diff() == 0).nonzero().flatten().tolist()
    buffers: list[Tensor | None] = []
    for operand, want in zip((*stacked, *adapters.factors[: len(needed) - 6]), needed[2:], strict=True):
        buffers.append(
            torch.empty(operand.shape, dtype=operand.dtype) if want and operand is not None else None
        )
        if (gradient := buffers[-1]) is not None:
            for expert in idle:
                gradient[expert].zero_()
    buffers += [None] * (8 - len(buffers))
    return Gradients(
        x.new_zeros(x.shape, dtype=total) if needed.hidden_states else None,
        weights.new_zeros(weights.shape, dtype=total) if needed.top_k_weights else None,
        *buffers,
    )

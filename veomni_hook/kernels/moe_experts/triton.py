"""Experts in Triton: rows gathered inside the first product, the gate in its epilogue, no synchronisation.

Forward:  [g, u] = x[token] U_e + u_e;  h = gate(g, u);  y = h D_e + d_e;  result_t = sum_k w y
Backward: dh = grad[token] D_e';  [dg, du] = gate'(g, u) (w dh);  dx_t = sum_k [dg, du] U_e'
          dw = <dh, h> + <grad[token], d_e>;  dD_e = (w h)' grad[token];  dU_e = x[token]' [dg, du]
Shapes: `forms.Operands`; one row for each of the tokens * k pairs, sorted by expert. Ids without an expert
add nothing and get no gradient. `triton_products` lists what is in float32. Sums over k run over a token's
places in order, so results are deterministic.
Saved: the operands, [g, u] in the dtype of the products, and the position of every row; h is recomputed, y
is not needed. Mutates: the saved [g, u], which its gradient overwrites; a second backward through a retained
graph recomputes it.

Memory for 16,384 tokens of 2,048, 128 experts of 768, top 8, bfloat16, in MiB as counted by torch's
allocator: from forward to backward, the result takes 64, g and u 384 and the row tables 1.6. The forward's
peak is 1,090, with h 192 and y 512. Backward adds, in order, w h 192 and sums 3; dD 384, then w h is freed;
rows of dx 512 and dx 64, then the rows are freed; dU 768. A step peaks at its end, at 64 + 384 + 2 + 384 +
64 + 768 = 1,666, or 1.63 GiB, of which 1,152 are the gradients of weights. An H200 confirmed this, in 7.0 ms
(2.1 forward), 66 % of the rate of a large product (72). Under the dispatcher (torch.compile), [dg, du] take
384 more, and [g, u] is freed with its graph.

On a Hopper GPU, Gluon's kernels compute the gradients of weights, of gate and of up where they can
(`gluon_choice`), with the same memory.

If experts are few and wide (`triton_tiles.worth_ordering`), rows are first copied into experts' order instead
of being gathered by each product: rows of x in the forward, rows of grad and then of x in the backward, one
copy at a time.

With ``Form.float8``, operands are cast first, and `triton_float8` computes gradients. The memory of g and u
serves for their gradients, and is given back once these are cast, unless a bias or an adapter wants them.

With low-rank adapters (`adapted`), ``low = s x[token] A_e`` is made first, and the kernel of the product adds
``low B_e``. Kept besides: both lows, [rows, RANK]. A frozen weight has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from veomni_hook.kernels.gated_mlp.triton import ACTIVATIONS
from veomni_hook.kernels.moe_experts import forms, triton_float8, triton_products, triton_sums
from veomni_hook.kernels.moe_experts.autograd import kernel_of
from veomni_hook.kernels.moe_experts.forms import Form, Operands, kept_shape
from veomni_hook.kernels.moe_experts.identity import experts_or_identity, identity_refuses
from veomni_hook.kernels.moe_experts.low_rank import AdaptedWeight, Adapters, is_adapted, without_adapters
from veomni_hook.kernels.moe_experts.operators import Gradients, Needed, define_backend
from veomni_hook.kernels.moe_experts.provenance import chose_ours
from veomni_hook.kernels.moe_experts.triton_adapters import (
    MOST_RANK,
    Adapter,
    adapter,
    factor_gradients,
    kept_lows,
    low_of,
    padded_rank,
    weighted_rows,
)
from veomni_hook.kernels.moe_experts.triton_float8 import cast_rows, operands_of
from veomni_hook.kernels.moe_experts.triton_products import Expert, Low
from veomni_hook.kernels.moe_experts.triton_routing import Routing, numbers_of, route, routing_of
from veomni_hook.kernels.moe_experts.triton_tiles import row_block, worth_ordering
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.readiness import note_ready

__all__ = [
    "gated_or_identity",
    "in_float8",
    "kernel",
    "loses",
    "loses_in_float32",
    "refuses",
    "refuses_or_identity",
]

Tensor = torch.Tensor

#: Form numbers of the device code, by the gate of a layout. All gates compute in float32 internally, so
#: `product_float32` is the same form.
_GATES = {
    "product": 0,
    "product_float32": 0,
    "clamped": 1,
    "clamped_after": 2,
    "scaled_sigmoid": 3,
    "activation": 4,
}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _expert(form: Form) -> Expert:
    layout = LAYOUTS[form.variant]
    return Expert(
        _GATES[layout.gate],
        ACTIVATIONS[form.activation],
        form.limit,
        form.alpha,
        layout.transposed,
        layout.interleaved,
        layout.gate == "activation",
    )


def _block(operands: Operands, form: Form) -> int:
    pairs, dtype = operands.top_k_index.numel(), form.dtype
    if form.float8:
        return triton_float8.BLOCK
    return row_block(pairs, operands.up.shape[0], dtype.itemsize)


def _ordered(operands: Operands, form: Form) -> bool:
    """Whether to copy rows of tokens into experts' order instead of gathering them in each product."""
    if form.float8:
        return False  # half the bytes
    inner = operands.down.shape[1 if LAYOUTS[form.variant].transposed else 2]
    x, pairs, num_experts = operands.hidden_states, operands.top_k_index.numel(), operands.up.shape[0]
    return worth_ordering(x, form.dtype, pairs, num_experts, inner)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [tokens, columns] in ``dtype``, with contiguous elements in each row and any row stride."""
    x = x.to(dtype)
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _first_product(
    operands: Operands,
    form: Form,
    x: Tensor,
    routing: Routing,
    *,
    keep: bool,
    adapted: Adapter | None = None,
) -> tuple[Tensor, Tensor | None, Low | None]:
    expert = _expert(form)
    ordered = _ordered(operands, form)
    rows = triton_products.ordered(x, routing) if ordered else x
    low = low_of(adapted, rows, routing, ordered=ordered)
    rows, up, transposed, scales = operands_of(rows, operands.up, form, transposed=expert.transposed)
    return *triton_products.gate_up(
        rows, up, operands.up_bias, routing, expert._replace(transposed=transposed), keep=keep,
        ordered=ordered, low=low, scales=scales,
    ), low  # fmt: skip


def _forward(operands: Operands, adapters: Adapters, form: Form, *, keep: bool) -> tuple[Tensor, ...]:
    x, index, weights, up, _, down, down_bias = operands
    of_up, of_down = adapter(adapters.up, form.dtype), adapter(adapters.down, form.dtype)
    routing = route(index, up.shape[0], _block(operands, form))
    h, products, up_low = _first_product(
        operands, form, _rows(x, form.dtype), routing, keep=keep, adapted=of_up
    )
    down_low = low_of(of_down, h, routing, ordered=True)
    h, down, transposed, scales = operands_of(h, down, form, transposed=LAYOUTS[form.variant].transposed)
    y = triton_products.rows_product(
        h, down, routing, bias=down_bias, transposed=transposed, low=down_low, scales=scales
    )
    del h, down, scales
    result = triton_sums.combine(y, routing, weights, dtype=x.dtype)
    if products is None:
        return result, *_like_kept(operands, adapters, form, keep=False)
    lows = (products.new_empty(0) if low is None else low.rows for low in (up_low, down_low))
    return result, products, routing.numbers, *lows


def _like_kept(
    operands: Operands, adapters: Adapters, form: Form, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = operands.top_k_index
    products = index.new_empty(kept_shape(operands, form, keep=keep), dtype=form.dtype)
    numbers = numbers_of(index.numel(), operands.up.shape[0]) if keep else 0
    up, down = (
        products.new_empty(
            (products.shape[0], padded_rank(into.shape[1])) if keep and into is not None else 0
        )
        for into in (adapters.up_into, adapters.down_into)
    )
    return products, index.new_empty(numbers, dtype=torch.int32), up, down


def _kept(
    operands: Operands,
    rows: Tensor,
    kept: Sequence[Tensor | None],
    of_up: Adapter | None,
    of_down: Adapter | None,
    form: Form,
) -> tuple[Tensor, Routing, Low | None, Low | None]:
    """Return gate and up, the routing and both lows as the forward kept them, or computed again."""
    index, num_experts, block = operands.top_k_index, operands.up.shape[0], _block(operands, form)
    products, numbers = kept[:2]
    if products is not None and numbers is not None:
        routing = routing_of(numbers, index, num_experts, block, products.shape[0])
        return products, routing, *kept_lows(of_up, of_down, kept[2:])
    routing = route(index, num_experts, block)
    h, products, up_low = _first_product(operands, form, rows, routing, keep=True, adapted=of_up)
    assert products is not None  # noqa: S101 - it was told to keep them
    return products, routing, up_low, low_of(of_down, h, routing, ordered=True)


def _backward(
    grad: Tensor,
    operands: Operands,
    adapters: Adapters,
    kept: Sequence[Tensor | None],
    form: Form,
    needed: Needed,
    *,
    spend: bool,
) -> Gradients:
    x, _, weights, up, up_bias, down, down_bias = operands
    expert = _expert(form)
    grad, rows = _rows(grad, form.dtype), _rows(x, form.dtype)
    of_up, of_down = adapter(adapters.up, form.dtype), adapter(adapters.down, form.dtype)
    spend = spend or kept[0] is None
    products, routing, up_low, down_low = _kept(operands, rows, kept, of_up, of_down, form)
    inner, ordered = down.shape[1 if expert.transposed else 2], _ordered(operands, form)
    grad_rows = triton_products.ordered(grad, routing) if ordered else grad
    down_back = low_of(of_down, grad_rows, routing, ordered=ordered, back=True)
    # What gradients are products of: tensors, or in float8 casts of them.
    of_grad: Any = grad_rows
    of_x: Any = rows
    dz: Any
    weighted: Any
    if form.float8 and not form.mx:
        of_grad, of_x = cast_rows(grad), cast_rows(rows)
        of_dz, columns_of_dz, of_h, sums, dz, weighted = triton_float8.gate_gradients(
            of_grad, of_x, down, products, routing, weights, expert, form, needed, spend=spend,
            keep=bool(needed.up_bias or of_up or of_down), low=down_back,
        )  # fmt: skip
    else:
        dout, matrix, turned, scales = operands_of(grad_rows, down, form, transposed=not expert.transposed)
        dz, weighted, sums = triton_products.gate_up_backward(
            dout, matrix, products, routing, weights, expert._replace(transposed=not turned), spend=spend,
            ordered=ordered, low=down_back, scales=scales,
        )  # fmt: skip
        del dout, matrix, scales
        of_dz, columns_of_dz, of_h = dz, dz, weighted
    del products
    to_weights = to_down = to_down_bias = to_x = to_up = to_up_bias = None
    if needed.top_k_weights:
        to_weights = triton_sums.routing_gradient(sums, weights, routing, grad, down_bias)
    if needed.down:
        to_down = _weight_gradient(of_h, of_grad, routing, form, down.dtype, (False, not ordered))
    down_low = weighted_rows(down_low, routing, weights)
    to_down_factors = factor_gradients(
        weighted, grad_rows, down_low, down_back, of_down, routing, needed[8:], (False, not ordered)
    )
    del weighted, sums, grad_rows, down_low, down_back, of_h, of_grad
    if needed.down_bias and down_bias is not None:
        dtype = down_bias.dtype
        to_down_bias = triton_sums.bias_gradient(grad, routing, weights, gather=True, dtype=dtype)
    up_back = low_of(of_up, dz, routing, ordered=True, back=True)
    if needed.hidden_states:
        to_x = _input_gradient(of_dz, up, routing, form, x.dtype, up_back)
        del of_dz
        note_ready(to_x, to_weights)
    if ordered and (needed.up or needed.up_into):
        of_x = rows = triton_products.ordered(rows, routing)
    if needed.up:
        to_up = _weight_gradient(of_x, columns_of_dz, routing, form, up.dtype, (not ordered, False), inner)
    to_up_factors = factor_gradients(
        rows, dz, up_low, up_back, of_up, routing, needed[6:8], (not ordered, False)
    )
    if needed.up_bias and up_bias is not None:
        to_up_bias = triton_sums.bias_gradient(dz, routing, gather=False, dtype=up_bias.dtype)
    return Gradients(
        to_x, to_weights, to_up, to_up_bias, to_down, to_down_bias, *to_up_factors, *to_down_factors
    )


def _input_gradient(
    dz: Any,
    up: Tensor,
    routing: Routing,
    form: Form,
    dtype: torch.dtype,
    low: Low | None,
) -> Tensor:
    turned = not LAYOUTS[form.variant].transposed
    if form.float8 and not form.mx and turned and low is None:
        return triton_float8.input_gradient(dz, up, routing, form, dtype)
    dz, up, turned, scales = operands_of(dz, up, form, transposed=turned)
    rows = triton_products.rows_product(
        dz, up, routing, transposed=turned, low=low, scales=scales, to_input=True
    )
    del dz, up, scales
    return triton_sums.combine(rows, routing, dtype=dtype)


def _weight_gradient(
    inputs: Any,
    outputs: Any,
    routing: Routing,
    form: Form,
    dtype: torch.dtype,
    gathered: tuple[bool, bool],
    most: int | None = None,
) -> Tensor:
    """The gradient of stacked weights in their storage layout, from inputs and gradients of outputs."""
    gradient = triton_products.weight_gradient
    if form.float8:
        gradient = partial(triton_float8.weight_gradient, most=most)
    if LAYOUTS[form.variant].transposed:
        return gradient(inputs, outputs, routing, gathered=gathered, dtype=dtype)
    return gradient(outputs, inputs, routing, gathered=gathered[::-1], dtype=dtype)


_BACKEND = define_backend(
    "moe_experts_triton", _forward, _backward, _like_kept, kept=2, kept_adapted=4, spends=True
)

kernel = partial(kernel_of, _BACKEND)
in_float8 = partial(kernel_of, _BACKEND, float8=True)
gated_or_identity = partial(experts_or_identity, kernel("gated"))


def refuses(owner: object, *operands: object) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run, or None."""
    if is_adapted(operands):
        ranks = [operand.rank for operand in operands if type(operand) is AdaptedWeight]
        if too_high := [rank for rank in ranks if rank > MOST_RANK]:
            return f"the adapters have rank {too_high[0]}, the kernel takes at most {MOST_RANK}"
        operands = (*without_adapters(operands),)
    reason = forms.refuses(owner, *operands)
    if reason is not None:
        return reason
    tensors, rest = forms.taken_apart(operands)
    for value in rest:
        if type(value) in (int, float) and value < 0:
            return f"a limit or alpha is negative: {value}"
    dtype = forms.compute_dtype("gated", tensors)
    return None if dtype in _DTYPES else f"the kernel multiplies in 16 bits or float32, not {dtype}"


refuses_or_identity = partial(identity_refuses, refuses)


def loses(owner: object, hidden_states: Tensor, *_: object) -> str | None:
    """Return why upstream is as fast here, or None."""
    if hidden_states.dtype is torch.float32 and not torch.is_autocast_enabled(hidden_states.device.type):
        return loses_in_float32(owner)
    return None


def loses_in_float32(owner: object, *_: object) -> str | None:
    """Return why upstream is as fast if products are in float32."""
    if chose_ours(owner):
        return None
    return "float32 products do not use tensor cores; choose triton by name to use it"

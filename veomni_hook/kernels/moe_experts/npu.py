"""Experts with torch_npu operators: rows are permuted, multiplied in groups, and permuted back.

Forward:  rows = permute(x);  z = rows U_e + u_e;  h = gate(z);  y = h D_e + d_e;  result = unpermute(y, w)
Backward: g = permute(grad);  dh = g D_e';  dz = gate'(z) (w dh);  dx = unpermute(dz U_e', 1)
          dw = <dh, h> + <g, d_e>;  dU_e = rows' dz;  dD_e = (w h)' g
Shapes: `forms.Operands`; one row for each of the tokens * k pairs, sorted by expert.
``npu_moe_token_permute`` and ``npu_moe_token_unpermute`` are each other's backward. Every product is
``npu_grouped_matmul``, which has no backward: rows times one matrix per group (``group_type`` 0), or columns
grouped along the summed dimension (2). Group counts stay on the device. SiLU gates use ``npu_swiglu``, others
PyTorch (`torch_gating`). An id without an expert goes to the last expert with weight 0, because groups must
contain every row. It costs a row's products, adds nothing, and gets no gradient.
Saved: the operands, z in the dtype of the products, and the position of every row. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from veomni_hook.kernels.gated_mlp import npu as gated_npu
from veomni_hook.kernels.moe_experts import forms, torch_gating
from veomni_hook.kernels.moe_experts.autograd import kernel_of
from veomni_hook.kernels.moe_experts.forms import Form, Operands, kept_dtype, kept_shape
from veomni_hook.kernels.moe_experts.identity import experts_or_identity, identity_refuses
from veomni_hook.kernels.moe_experts.low_rank import Adapters
from veomni_hook.kernels.moe_experts.operators import Gradients, Needed, define_backend
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared import ascend

__all__ = ["gated_or_identity", "kernel", "refuses", "refuses_or_identity"]

# Documented limits of the operators: groups and experts per token; exclusive: pairs and matrix width.
_MOST_EXPERTS, _MOST_TOP_K = 1024, 512
_MOST_PAIRS, _MOST_COLUMNS = 16777215, 65536
#: ``split_item``: all results in one tensor. ``group_type``: what is grouped, rows or the summed dimension.
_ONE_RESULT, _ROWS, _SUMS = 3, 0, 2


class _Rows(NamedTuple):
    """Positions of pairs sorted by expert.

    Attributes:
        ids: ``[tokens, k]``, valid expert ids only.
        held: ``[tokens, k]``, whether the original id had an expert.
        ends: ``[E]`` int64, the end of each expert's rows.
        places: ``[tokens * k]`` int32, the row of each pair.
    """

    ids: Tensor
    held: Tensor
    ends: Tensor
    places: Tensor

    def share(self, weights: Tensor) -> Tensor:
        """The routing weight of every row, ``[rows, 1]``."""
        weights = self.weights(weights).reshape(-1)
        return torch.empty_like(weights).scatter_(0, self.places.long(), weights)[:, None]

    def weights(self, weights: Tensor) -> Tensor:
        """Routing weights ``[tokens, k]``, 0 for ids without an expert; in a dtype the operators support."""
        weights = weights.where(self.held, 0)
        return weights if weights.dtype in ascend.DTYPES else weights.float()

    def of_pairs(self, x: Tensor) -> Tensor:
        """Numbers ``[rows]`` in the order of pairs, ``[tokens, k]``; 0 for ids without an expert."""
        return x.index_select(0, self.places.long()).view(self.ids.shape).where(self.held, 0)

    def experts(self) -> Tensor:
        """The expert of every row, ``[rows]`` int64."""
        numbers = torch.arange(self.places.shape[0], device=self.ends.device)
        return torch.searchsorted(self.ends, numbers, right=True)


def _ids(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    is_held = (index >= 0) & (index < num_experts)
    index = index.where(is_held, num_experts - 1)
    ids = index.reshape(-1).long()
    counts = ids.new_zeros(num_experts).scatter_add_(0, ids, torch.ones_like(ids))
    return index, is_held, counts.cumsum(0)


def _permute(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``x`` ``[tokens, columns]`` for all pairs, sorted by expert, and the position of each pair."""
    rows, places = ascend.call("npu_moe_token_permute", x.contiguous(), index.contiguous())
    return rows, places


def _unpermute(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The sum of a token's rows, times ``weights`` ``[tokens, k]``."""
    output: Tensor = ascend.call("npu_moe_token_unpermute", rows, places, weights.contiguous())
    return output


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each row times its expert's matrix; ``matrices`` ``[E, in, out]`` may be transposed in memory."""
    (product,) = ascend.call(
        "npu_grouped_matmul", [rows], [matrices], group_list=ends, split_item=_ONE_RESULT, group_type=_ROWS,
        group_list_type=0,
    )  # fmt: skip
    return product  # type: ignore[no-any-return]


def _gradient(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """For each expert, ``left`` ``[rows, P]``, transposed, times ``right`` ``[rows, Q]``: ``[E, P, Q]``."""
    (found,) = ascend.call(
        "npu_grouped_matmul", [left.t()], [right], group_list=ends, split_item=_ONE_RESULT, group_type=_SUMS,
        group_list_type=0,
    )  # fmt: skip
    # torch_npu does not document the result of an empty group.
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return found.to(dtype).masked_fill_(empty[:, None, None], 0)  # type: ignore[no-any-return]


def _matrices(weights: Tensor, form: Form) -> Tensor:
    """The weights of all experts, ``[E, in, out]``, contiguous or transposed."""
    weights = weights.to(form.dtype)
    if not weights.is_contiguous() and not weights.transpose(1, 2).is_contiguous():
        weights = weights.contiguous()
    return weights if LAYOUTS[form.variant].transposed else weights.transpose(1, 2)


def _by_swiglu(form: Form) -> bool:
    """Whether ``npu_swiglu`` can compute the gate: gates before ups, SiLU, no clamp."""
    layout = LAYOUTS[form.variant]
    return layout.gate == "product" and form.activation == "silu" and not layout.interleaved


def _biased(x: Tensor, bias: Tensor | None, rows: _Rows, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if bias is None else x.to(dtype) + bias.index_select(0, rows.experts()).to(dtype)


def _forward(
    operands: Operands, adapters: Adapters, form: Form, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x, index, weights, up, up_bias, down, down_bias = operands
    if not index.numel() or not up.numel() or not x.numel():
        return x.new_zeros(x.shape), *_like_kept(operands, adapters, form, keep=keep)
    ids, is_held, ends = _ids(index, up.shape[0])
    sorted_rows, places = _permute(x.to(form.dtype), ids)
    rows = _Rows(ids, is_held, ends, places)
    z = _product(sorted_rows, _matrices(up, form), ends)
    del sorted_rows
    z = _biased(z, up_bias, rows, kept_dtype(operands, form))
    h = gated_npu.npu_swiglu(z) if _by_swiglu(form) else torch_gating.forward(z, form)
    y = _product(h.to(form.dtype), _matrices(down, form), ends)
    y = _biased(y, down_bias, rows, kept_dtype(operands, form))
    result = _unpermute(y, places, rows.weights(weights)).to(x.dtype)
    return (result, z, places) if keep else (result, *_like_kept(operands, adapters, form, keep=False))


def _like_kept(operands: Operands, adapters: Adapters, form: Form, *, keep: bool) -> tuple[Tensor, Tensor]:
    index = operands.top_k_index
    return (
        index.new_empty(kept_shape(operands, form, keep=keep), dtype=kept_dtype(operands, form)),
        index.new_empty(index.numel() if keep else 0, dtype=torch.int32),
    )


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
    x, index, weights, up, _, down, down_bias = operands
    if not index.numel() or not up.numel() or not x.numel():
        return _zeros(operands, needed)
    z, places = kept
    ids, held, ends = _ids(index, up.shape[0])
    rows = _Rows(ids, held, ends, places)
    g, _ = _permute(grad.to(form.dtype), ids)
    share = rows.share(weights)
    dh = _product(g, _matrices(down, form).transpose(1, 2), ends)
    weighted = (dh * share).to(z.dtype)
    if _by_swiglu(form):
        h, dz = gated_npu.npu_swiglu(z), gated_npu.npu_swiglu_backward(weighted, z)
    else:
        h, dz = torch_gating.backward(z, weighted, form)
    del weighted
    to_weights = to_x = to_up = to_down = to_up_bias = to_down_bias = None
    if needed.top_k_weights:
        dw = (dh.float() * h).sum(-1)
        if down_bias is not None:
            dw = dw + (g.float() * down_bias.index_select(0, rows.experts())).sum(-1)
        to_weights = rows.of_pairs(dw)
    del dh
    dz, scaled = dz.to(form.dtype), (h * share).to(form.dtype)
    if needed.down:
        to_down = _weight_gradient(scaled, g, ends, form, down.dtype)
    if needed.down_bias and down_bias is not None:
        to_down_bias = _sums((g * share).to(form.dtype), ends, down_bias.dtype)
    if needed.hidden_states:
        dx = _product(dz, _matrices(up, form).transpose(1, 2), ends)
        to_x = _unpermute(dx, places, held.to(dx.dtype))
    if needed.up:
        to_up = _weight_gradient(_permute(x.to(form.dtype), ids)[0], dz, ends, form, up.dtype)
    if needed.up_bias and operands.up_bias is not None:
        to_up_bias = _sums(dz, ends, operands.up_bias.dtype)
    return Gradients(to_x, to_weights, to_up, to_up_bias, to_down, to_down_bias)


def _weight_gradient(inputs: Tensor, outputs: Tensor, ends: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
    """The gradient of stacked weights in their storage layout, from inputs and gradients of outputs."""
    left, right = (inputs, outputs) if LAYOUTS[form.variant].transposed else (outputs, inputs)
    return _gradient(left, right, ends, dtype)


def _sums(x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of each expert's rows, ``[E, columns]``: a product with ones, so the order is fixed."""
    ones = x.new_ones(x.shape[0], _ALIGNED_BYTES // x.element_size())
    return _gradient(x, ones, ends, dtype)[..., 0].contiguous()


def _zeros(operands: Operands, needed: Needed) -> Gradients:
    inputs = operands.hidden_states, *operands[2:]
    return Gradients(
        *(
            torch.zeros_like(operand) if want and operand is not None else None
            for operand, want in zip(inputs, needed, strict=False)
        )
    )


# Rows of the products' operands must be multiples of this.
_ALIGNED_BYTES = 32

_BACKEND = define_backend("moe_experts_npu", _forward, _backward, _like_kept, kept=2)

kernel = partial(kernel_of, _BACKEND)
gated_or_identity = partial(experts_or_identity, kernel("gated"))


def refuses(owner: object, *operands: object) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run, or None."""
    reason = forms.refuses(owner, *operands)
    if reason is not None:
        return reason
    tensors, _ = forms.taken_apart(operands)
    dtype = forms.compute_dtype("gated", tensors)
    if dtype not in ascend.DTYPES:
        return f"the kernel multiplies in 16 bits or float32, not {dtype}"
    _, index, _, up, _, down, _ = tensors
    if up.shape[0] > _MOST_EXPERTS or index.shape[1] > _MOST_TOP_K or index.numel() >= _MOST_PAIRS:
        return (
            f"the operators support at most {_MOST_EXPERTS} experts, a top_k of at most {_MOST_TOP_K} and"
            f" fewer than {_MOST_PAIRS} pairs, not {up.shape[0]}, {index.shape[1]} and {index.numel()}"
        )
    if max(*up.shape[1:], *down.shape[1:]) >= _MOST_COLUMNS:
        return f"the operators support matrices of fewer than {_MOST_COLUMNS} columns"
    return None


refuses_or_identity = partial(identity_refuses, refuses)

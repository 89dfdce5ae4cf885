"""Attention by segment in one launch, forward and backward, with ``npu_fusion_attention``.

Forward:  y = softmax(scaling * q k^T) v within each segment
Backward: by the operator's own, from the row maxima and sums of the forward; recorded: of the formula
Shapes: as in `reference`; the operator takes ``[positions, heads, width]`` ("TND") and the ends of segments
on the host. Saved: query, key, value, y, and two float32 tensors of ``[positions, heads, 8]``.
Mutates: nothing; the host waits for boundaries that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from veomni_hook.kernels.shared import ascend
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operand_checks import dtype_of
from veomni_hook.kernels.varlen_attention import reference
from veomni_hook.kernels.varlen_attention.operand_checks import lengths_of

__all__ = ["full", "refuses"]

_LAYOUT = "TND"
# The operator's documented limits.
_MOST_SEGMENTS, _MOST_POSITIONS, _MOST_HEADS, _WIDEST = 1024, 1 << 20, 256, 768


def _forward(query: Tensor, key: Tensor, value: Tensor, ends: list[int], scale: float) -> tuple[Tensor, ...]:
    y, largest, total, *_ = ascend.call(
        "npu_fusion_attention", query, key, value, query.shape[1], _LAYOUT,
        scale=scale, actual_seq_qlen=ends, actual_seq_kvlen=ends,
    )  # fmt: skip
    return y, largest, total


def _gradients(saved: Sequence[Tensor], rest: tuple[list[int], float], _: object, dy: Tensor) -> list[Tensor]:
    query, key, value, y, largest, total = saved
    ends, scale = rest
    # Later releases return the gradient of sinks as well.
    slopes = ascend.call(
        "npu_fusion_attention_grad", query, key, value, dy.contiguous(), query.shape[1], _LAYOUT,
        softmax_max=largest, softmax_sum=total, attention_in=y,
        scale_value=scale, actual_seq_qlen=ends, actual_seq_kvlen=ends,
    )  # fmt: skip
    return slopes[:3]  # type: ignore[no-any-return]


def _definition(query: Tensor, key: Tensor, value: Tensor, ends: list[int], scale: float) -> Tensor:
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    bounds = torch.tensor([0, *ends])
    return reference.full(query, key, value, bounds, reference.full, {"scaling": scale})[0]


#: Takes query, key, value, the ends of segments and the scale.
_attention: Callable[..., Tensor] = differentiable(_forward, _gradients, _definition, tensors=3, reread=(0,))


def full(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    attention: Callable[..., object],
    options: Mapping[str, object],
) -> Tensor:
    """Return attention within the segments; see `reference.full`."""
    dtype = dtype_of(query)
    tensors = [tensor[0].transpose(0, 1).to(dtype).contiguous() for tensor in (query, key, value)]
    scaling = options.get("scaling")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    ends = [*accumulate(filter(None, lengths_of(cu_seqlens)))]
    return _attention(*tensors, ends, scale).unsqueeze(0)


def refuses(
    owner: object, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *others: object
) -> str | None:
    """Return what the operator refuses, beside `operand_checks`, or None."""
    if dtype_of(query) not in ascend.DTYPES:
        return f"operands have dtype {dtype_of(query)}"
    if key.shape != value.shape:
        return "key and value have heads of different widths"
    _, heads, positions, width = query.shape
    segments = len(lengths_of(cu_seqlens))
    if segments > _MOST_SEGMENTS or positions > _MOST_POSITIONS or heads > _MOST_HEADS or width > _WIDEST:
        limits = f"{segments} segments, {positions} positions, {heads} heads of {width}"
        return f"{limits} are more than the operator takes"
    return None

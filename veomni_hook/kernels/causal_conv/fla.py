"""Causal convolutions by flash-linear-attention, where it is asked for by name.

Its function takes channels last, and samples that share a row in a batch of one row.
"""

from __future__ import annotations

import torch

from veomni_hook.kernels.shared.autograd import differentiated_once
from veomni_hook.kernels.shared.operand_checks import DTYPES

__all__ = ["depthwise", "refuses"]

Tensor = torch.Tensor


def depthwise(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return what `reference.depthwise` says."""
    from fla.modules.causal_conv1d import causal_conv1d

    x = hidden_states.transpose(1, 2)
    shape = x.shape
    if cu_seqlens is not None:
        x = x.flatten(0, 1).unsqueeze(0)
    ends = None if cu_seqlens is None else cu_seqlens.long()
    output: Tensor = causal_conv1d(
        x.contiguous(), weight=weight.contiguous(), bias=bias, activation=activation, cu_seqlens=ends
    )[0]
    return differentiated_once("causal_conv=fla", output.reshape(shape).transpose(1, 2))


def refuses(
    owner: object, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, *others: object
) -> str | None:
    """Return what the kernel refuses, beside `operand_checks`, or None."""
    dtypes = {tensor.dtype for tensor in (hidden_states, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not dtypes <= DTYPES:
        return f"the input is {hidden_states.dtype}, the weight {weight.dtype}"
    return None

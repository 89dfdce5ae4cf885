"""What a causal convolution of one channel at a time computes, sample by sample.

It is the short convolution of Mamba (arXiv 2312.00752), which Gated DeltaNet (arXiv 2412.06464) puts in front
of its rule.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

__all__ = ["depthwise"]


def depthwise(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``activation(bias + sum_j weight[:, j] * x[:, :, t - taps + 1 + j])``, zeros before a sample.

    Args:
        hidden_states: ``[rows, channels, positions]``.
        weight: ``[channels, taps]``.
        bias: ``[channels]``, or None.
        activation: ``"silu"`` or ``"swish"``, or None for none.
        cu_seqlens: ``[samples + 1]``, integers: 0, then the end of each sample, counted through all rows; the
            last is ``rows * positions``, and no sample is in two rows. None: each row is a sample.

    Returns:
        The shape and dtype of ``hidden_states``. Computed in float32, in float64 if that is float64; the sum
        is rounded to the dtype of ``weight``, as upstream's.
    """
    rows, _, positions = hidden_states.shape
    taps = weight.shape[1]
    dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
    x = hidden_states.to(weight.dtype).to(dtype).transpose(0, 1).flatten(1)
    of_rows = [row * positions for row in range(rows + 1)]
    ends = of_rows if cu_seqlens is None else cu_seqlens.tolist()
    outputs = [x[:, :0]]
    for start, end in pairwise(ends):
        before = functional.pad(x[:, start:end], (taps - 1, 0))
        added = torch.zeros_like(x[:, start:end])
        if bias is not None:
            added = added + bias.to(dtype)[:, None]
        for tap in range(taps):
            added = added + weight[:, tap, None].to(dtype) * before[:, tap : tap + end - start]
        outputs.append(added)
    output = torch.cat(outputs, dim=1).view(weight.shape[0], rows, positions).transpose(0, 1).to(weight.dtype)
    return (output if activation is None else functional.silu(output)).to(hidden_states.dtype)

"""The decay of linear attention by definition: the oracle for tests.

``log_decay = -exp(log_rate) * softplus(a + bias)`` (Gated DeltaNet, arXiv 2412.06464, after Mamba-2). Shapes:
a, b ``[batch, positions, heads]`` of one dtype; log_rate, bias ``[heads]``.

With a decay for each channel (Kimi Linear, arXiv 2510.26692): x ``[batch, positions, heads, width]``,
log_rate ``[1, 1, heads, 1]``, bias ``[heads * width]``. With a bound it is
``lower * sigmoid(exp(log_rate) * (x + bias))``.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["channels", "channels_rounded_rate", "softplus", "softplus_and_sigmoid"]


def softplus(a: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``-exp(log_rate) * softplus(a + bias)`` in float32."""
    return -log_rate.float().exp() * functional.softplus(a.float() + bias)


def softplus_and_sigmoid(
    a: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``sigmoid(b)`` in the dtype of ``b``, and `softplus`."""
    return b.sigmoid(), softplus(a, log_rate, bias)


def channels(
    x: torch.Tensor,
    log_rate: torch.Tensor,
    bias: torch.Tensor,
    dtype: torch.dtype | None,
    bounded: bool,
    lower: float | None,
) -> torch.Tensor:
    """Return the decay of each channel in ``dtype`` (None: float32); ``lower`` is the bound, if ``bounded``.

    Upstream also writes softplus as ``log(1 + exp(z))``, whose gradient above 88 is not a number; here it is.
    """
    return _channels(x, log_rate.float().exp(), bias, dtype, lower if bounded else None)


def channels_rounded_rate(
    x: torch.Tensor,
    log_rate: torch.Tensor,
    bias: torch.Tensor,
    dtype: torch.dtype | None,
    bounded: bool,
    lower: float | None,
) -> torch.Tensor:
    """Return `channels`, with the exponential in the dtype of ``log_rate``."""
    return _channels(x, log_rate.exp(), bias, dtype, lower if bounded else None)


def _channels(
    x: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype | None, lower: float | None
) -> torch.Tensor:
    z = (x.flatten(-2).float() + bias).view(x.shape)
    g = -rate * functional.softplus(z) if lower is None else lower * torch.sigmoid(rate * z)
    return g.to(dtype or torch.float32)

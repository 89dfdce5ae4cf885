"""Which calls any kernel of a decay can take."""

from __future__ import annotations

import torch

from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["fits", "fits_channels", "refuses", "refuses_channels", "refuses_with_sigmoid"]


def refuses(owner: object, x: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor) -> str | None:
    """Return why this call must run the upstream code, or None.

    ``x`` is ``a``, or a tensor from which upstream's code will compute it: kernels look at that (`fits`).
    """
    if (reason := _unsuited(x, log_rate, bias)) is not None:
        return reason
    return None if log_rate.ndim == bias.ndim == 1 else "the rate and the bias are not one per head"


def refuses_with_sigmoid(
    owner: object, a: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor, b: torch.Tensor
) -> str | None:
    """Return why this call must run the upstream code, or None."""
    if not isinstance(b, torch.Tensor):
        return f"an operand is a {type(b).__name__}"
    if (reason := refuses(owner, a, log_rate, bias) or not_plain(b)) is not None:
        return reason
    return None if b.shape == a.shape else f"shapes: a {[*a.shape]}, b {[*b.shape]}"


def fits(a: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor) -> bool:
    """Return whether a kernel can take ``a``: a plain tensor with a column for each head."""
    heads = a.shape[-1:]
    return not_plain(a) is None and log_rate.shape == bias.shape == heads and a.device == bias.device


def refuses_channels(
    owner: object,
    x: torch.Tensor,
    log_rate: torch.Tensor,
    bias: torch.Tensor,
    dtype: object,
    bounded: object,
    lower: object,
) -> str | None:
    """Return why this call must run the upstream code, or None; ``x`` as in `refuses`."""
    if (reason := _unsuited(x, log_rate, bias)) is not None:
        return reason
    if bounded and type(lower) not in (int, float):
        return f"the bound is a {type(lower).__name__}"
    return None if bias.ndim == 1 else "the bias is not one per channel"


def fits_channels(x: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor) -> bool:
    """Return whether a kernel can take ``x``: plain, and shaped as the parameters ask."""
    if not_plain(x) is not None or x.ndim != 4 or x.device != bias.device:
        return False
    heads, width = x.shape[2:]
    return log_rate.shape == (1, 1, heads, 1) and bias.shape == (heads * width,)


def _unsuited(*operands: object) -> str | None:
    for operand in operands:
        if not isinstance(operand, torch.Tensor):
            return f"an operand is a {type(operand).__name__}"
    return not_plain(*operands) or untraceable()

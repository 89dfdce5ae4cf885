"""Which calls kernels of hyper-connections take.

The slot has already checked that the norm's class has the recognised forward
(`veomni_hook.kernels.slot.skipped`); here is what else the call of a norm may do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veomni_hook.kernels.shared.module_calls import call_is_seen
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain, untraceable

__all__ = ["refuses", "refuses_collapse", "refuses_mix", "unsupported"]

#: Numbers of streams that they do: a power of two, because programs hold all streams of their columns.
_STREAMS = (2, 4, 8)


def refuses(
    owner: object,
    hidden_streams: Tensor,
    norm: Any,
    norm_class: object,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    streams: object,
    iterations: object,
    eps: object,
) -> str | None:
    """Return why this call must run the upstream code, or None; operands are those of the reference."""
    reason = _unfit(hidden_streams, norm, norm_class, fn, base, scale, eps)
    if reason is not None:
        return reason
    if type(streams) is not int or streams != hidden_streams.shape[2]:
        return "the number of streams is not the size of their dimension"
    if type(iterations) is not int or iterations < 1:
        return "the number of iterations is not a positive integer"
    return _unshaped(hidden_streams, fn, base, scale, (2 + streams) * streams, 3)


def refuses_collapse(
    owner: object,
    hidden_streams: Tensor,
    norm: Any,
    norm_class: object,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: object,
) -> str | None:
    """Return why this call must run the upstream code, or None; operands are those of the reference."""
    reason = _unfit(hidden_streams, norm, norm_class, fn, base, scale, eps)
    return reason or _unshaped(hidden_streams, fn, base, scale, hidden_streams.shape[2], 1)


def _unfit(
    hidden_streams: Tensor,
    norm: Any,
    norm_class: object,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: object,
) -> str | None:
    if type(norm) is not norm_class:
        return f"the norm is a {type(norm).__module__}.{type(norm).__qualname__}, not the recognised class"
    if (seen := call_is_seen(norm)) is not None:
        return f"the norm {seen}, which a fused kernel would skip"
    if type(eps) is not float or type(norm.eps) is not float:
        return "an eps is not a float"
    return _unlike(hidden_streams, fn, base, scale)


def refuses_mix(
    owner: object,
    post: Tensor,
    comb: Tensor,
    output: Tensor,
    hidden_streams: Tensor,
    dtype: object,
) -> str | None:
    """Return why streams must be mixed by upstream's code, or None.

    Args:
        owner: the layer.
        post: ``[batch, length, N]``.
        comb: ``[batch, length, N, N]``.
        output: ``[batch, length, D]``, of the streams' dtype.
        hidden_streams: ``[batch, length, N, D]``.
        dtype: what upstream casts both weights to.
    """
    if (reason := _unlike(hidden_streams, post, comb, output)) is not None:
        return reason
    batch, length, streams, columns = hidden_streams.shape
    shapes = (batch, length, streams), (batch, length, streams, streams), (batch, length, columns)
    if (post.shape, comb.shape, output.shape) != shapes:
        return "the weights or the output have another shape than the streams"
    if dtype is not hidden_streams.dtype or output.dtype is not dtype:
        return "the streams and the output are not in one dtype"
    return None


def _unlike(streams: Tensor, *others: Tensor) -> str | None:
    """Return why streams ``[batch, length, N, D]`` and other operands cannot be computed with, or None."""
    if (reason := not_plain(streams, *others) or untraceable()) is not None:
        return reason
    if streams.ndim != 4 or not streams.numel():
        return "the streams do not have the shape [batch, length, streams, columns]"
    if not all(other.is_floating_point() for other in (streams, *others)):
        return "an operand does not consist of floating-point numbers"
    if any(other.device != streams.device for other in others):
        return "the operands are on different devices"
    autocast = torch.is_autocast_enabled(streams.device.type)
    return "autocast is active, which casts products" if autocast else None


def _unshaped(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weights: int, scales: int) -> str | None:
    columns = x.shape[2] * x.shape[3]
    if (fn.shape, base.shape, scale.shape) == ((weights, columns), (weights,), (scales,)):
        return None
    return "the parameters do not have the recognised shapes"


def unsupported(streams: Tensor, *others: Tensor) -> str | None:
    """Return why Triton's kernels do not support streams ``[batch, length, N, D]`` and weights, or None."""
    for other in (streams, *others):
        if other.dtype not in DTYPES:
            return f"the kernel does not support {other.dtype}"
    return None if streams.shape[2] in _STREAMS else f"the kernel does not support {streams.shape[2]} streams"

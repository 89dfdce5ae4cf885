"""What the Triton kernels of hyper-connections support."""

from __future__ import annotations

import torch

__all__ = ["unsupported"]

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
#: Numbers of streams: a power of two, because programs hold all streams of their columns.
_STREAMS = (2, 4, 8)


def unsupported(streams: torch.Tensor, *others: torch.Tensor) -> str | None:
    """Return why kernels do not support streams ``[batch, length, N, D]`` and their weights, or None."""
    for other in (streams, *others):
        if other.dtype not in _DTYPES:
            return f"the kernel does not support {other.dtype}"
    return None if streams.shape[2] in _STREAMS else f"the kernel does not support {streams.shape[2]} streams"

"""The floor of a step: its matrix products and its attention, as upstream calls them, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Products"]

#: The operators that count, with those of `scaled_dot_product_attention`.
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
REPEATS = 5


class Products(TorchDispatchMode):
    """Adds up the time of the products and the attention of the code in its block, forward and backward.

    Each is called again, `REPEATS` times in a row with the same operands, so that nothing but it is timed.

    Attributes:
        ms: the sum of the means.
        calls: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ms = 0.0
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in PRODUCTS or "scaled_dot_product" in name:
            self.ms += _milliseconds(func, args, kwargs)
            self.calls += 1
        return result


def _milliseconds(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Return what a call takes: by the device's clock if it has a tensor on CUDA, else by the host's."""
    if not any(isinstance(one, torch.Tensor) and one.is_cuda for one in args):
        began = time.perf_counter()
        for _ in range(REPEATS):
            func(*args, **kwargs)
        return 1e3 * (time.perf_counter() - began) / REPEATS
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        func(*args, **kwargs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPEATS

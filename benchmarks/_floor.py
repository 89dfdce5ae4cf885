"""The floor of a step: its matrix products and its attention, as upstream calls them, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Products"]

#: The operators that count, with those of `scaled_dot_product_attention`.
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})


class Products(TorchDispatchMode):
    """Keeps the products and the attention of the code in its block, both passes, with their operands.

    Called again one behind the other, they load the device as a step does. Where each is waited for, the
    device's clock is higher.

    Attributes:
        calls: operators with their arguments, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Mapping[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in PRODUCTS or "scaled_dot_product" in name:
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    @torch.no_grad()
    def again(self) -> None:
        """Make the calls again."""
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)

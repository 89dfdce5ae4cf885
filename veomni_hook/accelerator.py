"""The accelerator, a CUDA GPU or an Ascend NPU, for code that supports either.

``torch.cuda`` and ``torch.npu`` have the same interface; torch_npu adds the latter when torch is imported.
Importing this module loads no torch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["TYPES", "best", "module"]

#: Torch device types of accelerators, preferred one first: under `torch_npu.contrib.transfer_to_npu`, which
#: replaces ``torch.cuda`` by ``torch.npu``, both are available, and tensors are on ``npu``.
TYPES = ("npu", "cuda")


def best() -> str:
    """Return the device type of this machine's accelerator, or ``cpu``; imports torch."""
    import torch

    for device in TYPES:
        found = getattr(torch, device, None)
        if found is not None and found.is_available():
            return device
    return "cpu"


# Called at every launch: reading the type of a `torch.device` alone takes longer than a cache lookup.
@cache
def module(device: str | torch.device) -> Any:
    """Return the module for an accelerator's events, memory and current device; imports torch.

    Args:
        device: a torch device type, or a device.

    Returns:
        ``torch.cuda`` or ``torch.npu``; None if ``device`` is not an accelerator.

    Raises:
        RuntimeError: this torch has no such device.
    """
    import torch

    kind = device if isinstance(device, str) else device.type
    return torch.get_device_module(kind) if kind in TYPES else None

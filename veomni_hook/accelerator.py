"""The device that is no CPU, a CUDA GPU or an Ascend NPU: for code that means either of them.

``torch.cuda`` and ``torch.npu`` have one interface; torch_npu adds the second when torch is imported.
Importing this module loads no torch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["TYPES", "best", "module"]

#: Torch device types of accelerators, the preferred one first: where `torch_npu.contrib.transfer_to_npu` has
#: ``torch.npu`` stand in for ``torch.cuda``, both are available, and tensors are on ``npu``.
TYPES = ("npu", "cuda")


def best() -> str:
    """Return the device type of the accelerator here, else ``cpu``; imports torch."""
    import torch

    for device in TYPES:
        found = getattr(torch, device, None)
        if found is not None and found.is_available():
            return device
    return "cpu"


# Kernels ask at every launch: the type of a `torch.device` alone takes longer than a look into the cache.
@cache
def module(device: str | torch.device) -> Any:
    """Return what has the events, memory and current device of an accelerator; imports torch.

    Args:
        device: a torch device type, or a device.

    Returns:
        ``torch.cuda`` or ``torch.npu``; None where ``device`` is no accelerator.

    Raises:
        RuntimeError: this torch has no such device.
    """
    import torch

    kind = device if isinstance(device, str) else device.type
    return torch.get_device_module(kind) if kind in TYPES else None

"""The accelerator, a CUDA GPU or an Ascend NPU, for code that supports either.

``torch.cuda`` and ``torch.npu`` have the same interface; torch_npu adds the latter when torch is imported.
Importing this module loads no torch.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["TYPES", "best", "is_rocm", "module", "torch_version"]

#: Torch device types of accelerators, preferred one first: under `torch_npu.contrib.transfer_to_npu`, which
#: replaces ``torch.cuda`` by ``torch.npu``, both are available, and tensors are on ``npu``.
TYPES = ("npu", "cuda")


def best() -> str:
    """Return the device type of this machine's accelerator, or ``cpu``.

    Imports torch, unless its build knows no GPU and no installed distribution adds another device to it.
    """
    from importlib.metadata import entry_points

    if "torch" not in sys.modules and _build().get("cuda", "") is _build().get("hip", "") is None:
        if not entry_points(group="torch.backends"):
            return "cpu"
    import torch

    for device in TYPES:
        device_module = getattr(torch, device, None)
        if device_module is not None and device_module.is_available():
            return device
    return "cpu"


def is_rocm() -> bool:
    """Return whether torch's ``cuda`` devices are AMD's GPUs; imports torch only if its files do not say it.

    Kernels do not ask: what they need is in their `Requirement`. Code that goes another way there asks.
    """
    if "torch" not in sys.modules and "hip" in _build():
        return _build()["hip"] is not None
    import torch

    return torch.version.hip is not None


def torch_version() -> str:
    """Return torch's version; imports torch only if its files do not say it."""
    if "torch" not in sys.modules and (version := _build().get("__version__")):
        return str(version)
    import torch

    return str(torch.__version__)


@cache
def _build() -> dict[str, object]:
    """What torch's file ``version.py`` says about its build; empty if there is none."""
    spec = PathFinder.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        if os.path.isfile(path := os.path.join(folder, "version.py")):
            from runpy import run_path

            return run_path(path)
    return {}


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

"""Checks of numbers of tokens and features, asserted where the numbers are.

Patched code calls `check` in place of transformers' ``torch_compilable_check``. On a CUDA device the
assertion is a part of the stream: it fails at the next synchronisation, with the message in what CUDA prints.
Everywhere else, and in compiled code, transformers' own function runs with the same condition and text.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from veomni_hook.accelerator import is_rocm
from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.kernels.shared.origin import written_in

__all__ = ["asserts", "check", "selected"]

_UPSTREAM = ("transformers.utils.import_utils", "torch_compilable_check")
#: transformers' switch: with it, nothing is checked.
_DISABLED = "TRANSFORMERS_DISABLE_TORCH_CHECK"
_ON_DEVICE = "on the device"


def check(upstream: Callable[..., object], condition: Any, message: Callable[..., str]) -> None:
    """Check a condition as ``upstream(condition, message())`` does, without a value read from a GPU.

    Args:
        upstream: transformers' ``torch_compilable_check``, or what a user has put in its place.
        condition: a bool, or a bool tensor whose elements must all be true.
        message: returns the text; its parameters have the values that it shows as defaults.

    Raises:
        ValueError: the condition is false, and known to the host.
    """
    if not asserts(condition) or written_in(upstream) != _UPSTREAM:
        upstream(condition, message())
    elif os.getenv(_DISABLED, "0") != "1":
        shown = message.__defaults__ or ()
        torch._assert_async(condition.all(), message(*map(_told, shown)))


def selected(tensor: Any, mask: Any) -> Any:
    """Return ``tensor[mask].numel()``: an int, or a 0-dimensional int64 tensor on a GPU.

    On a GPU the number is a sum of the mask, if this is bool and has the first dimensions of ``tensor``.
    """
    if (
        asserts(mask)
        and mask.dtype is torch.bool
        and not_plain(tensor, mask) is None
        and tensor.device == mask.device
        and tensor.shape[: mask.ndim] == mask.shape
    ):
        return mask.sum() * tensor.shape[mask.ndim :].numel()
    return tensor[mask].numel()


def asserts(value: object) -> bool:
    """Return whether ``value`` is on a device that checks assertions by itself."""
    # ROCm leaves device assertions out. Compiled code has assertions of its own.
    return (
        not torch.compiler.is_compiling()
        and isinstance(value, torch.Tensor)
        and value.is_cuda
        and not is_rocm()
    )


def _told(value: object) -> Any:
    """Return what a message shows for a value, which is not read if it is on a device."""
    return _ON_DEVICE if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value

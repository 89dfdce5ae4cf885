"""Which calls of adapted layers are computed with the terms added in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from veomni_hook.kernels.low_rank_linear.products import mixes, widens
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.shared.adapters import inactive
from veomni_hook.kernels.shared.module_calls import call_is_seen, is_linear, parameter
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.origin import written_in

__all__ = ["Adapter", "autocast_dtype", "loses", "refuses", "remark"]

#: Dropout, down, up, scale; and what computes the adapter otherwise, or None.
Adapter = tuple[nn.Module, nn.Module, nn.Module, float, Any]

_CAST = "_cast_input_dtype"


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies now, or None without autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def refuses(owner: object, x: torch.Tensor, linear: nn.Module, adapters: Sequence[Adapter]) -> str | None:
    """Return why this call of the adapted layer ``owner`` must run the upstream code, or None."""
    if not adapters:
        return "no adapter is active"
    if (reason := not_plain(x) or untraceable()) is not None:
        return reason
    converts = autocast_dtype(x) is not None
    for adapter in adapters:
        reason = _kind_refused(x, adapter)
        reason = _weights_refused(x, adapter, converts=converts) if reason is None else reason
        if reason is not None:
            return reason
    if not converts and parameter(adapters[0][1], "weight").dtype is not x.dtype:
        return _cast_refused(owner)
    return None


def loses(owner: object, x: torch.Tensor, linear: nn.Module, adapters: Sequence[Adapter]) -> str | None:
    """Return why upstream was measured to be faster here, or None."""
    if widens(x) or autocast_dtype(x) is not None:
        return None
    # Forward and backward, 256 x 512 to 2,048 on 2 cores: 12 % slower; forward alone takes twice as long.
    if any(mixes(x.dtype, parameter(adapter[1], "weight").dtype) for adapter in adapters):
        return "float32 adapters of bfloat16 layers need products into float32: an NVIDIA GPU and torch 2.8"
    return None


def remark(owner: object, backend: str) -> str | None:
    """Return what becomes of the adapters of the layer ``owner``, which ``backend`` computes, or None."""
    if (state := inactive(owner)) is not None:
        return f"adapter {state}: the layer alone runs"
    return None if backend == EAGER else "adapter fused"


def _kind_refused(x: torch.Tensor, adapter: Adapter) -> str | None:
    dropout, down, up, scale, variant = adapter
    if variant is not None:
        return f"the adapter is a variant, {type(variant).__name__}"
    if type(scale) not in (int, float):
        return f"the adapter's scale is a {type(scale).__name__}"
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"the adapter's dropout is a {type(dropout).__name__}"
    if not is_linear(type(down)) or not is_linear(type(up)):
        names = f"{type(down).__name__} and {type(up).__name__}"
        return f"the adapter's factors are {names}, not plain nn.Linear"
    if parameter(down, "bias") is not None or parameter(up, "bias") is not None:
        return "a factor of the adapter has a bias"
    # The input of `up` is on the device of `x`, and `passes_on` allows nothing else to matter.
    seen = call_is_seen(dropout) or call_is_seen(down, x) or call_is_seen(up, x)
    return None if seen is None else f"a part of the adapter {seen}"


def _weights_refused(x: torch.Tensor, adapter: Adapter, *, converts: bool) -> str | None:
    _, down, up, _, _ = adapter
    weights = parameter(down, "weight"), parameter(up, "weight")
    if (reason := not_plain(*weights)) is not None:
        return reason
    kind = weights[0].dtype
    if kind is not weights[1].dtype:
        return f"the adapter's factors are {kind} and {weights[1].dtype}"
    if mixes(x.dtype, kind) is None and (not converts or torch.float64 in (x.dtype, kind)):
        return f"the adapter is {kind}, the input {x.dtype}"
    if not x.dtype.is_floating_point:
        return f"the input is {x.dtype}"
    for weight in weights:
        if weight.device != x.device:
            return f"the adapter is on {weight.device}, the input on {x.device}"
    return None


def _cast_refused(owner: object) -> str | None:
    """Return why the owner may not convert its input to the adapter's dtype, or None."""
    if not getattr(owner, "cast_input_dtype_enabled", True):
        return "the input's dtype is not to be converted"
    cast = getattr(owner, _CAST, None)
    if cast is None or not written_in(cast)[0].startswith("peft."):
        return f"{_CAST} was replaced"
    return None

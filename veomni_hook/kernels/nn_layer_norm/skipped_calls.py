"""Decides whether the call of a ``nn.LayerNorm`` may be skipped: only if it does nothing but compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from veomni_hook.kernels.shared.module_calls import call_is_seen
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.origin import written_in

__all__ = ["refuses", "refuses_norm"]


def _as_written(function: Any, *place: str) -> bool:
    return written_in(function) == place


#: Torch's own code; None if it was replaced before this module was imported: then every call is refused. As
#: attributes, which dynamo guards on.
_TORCHS = SimpleNamespace(
    forward=nn.LayerNorm.forward.__code__
    if _as_written(nn.LayerNorm.forward, nn.LayerNorm.__module__, "LayerNorm.forward")
    else None,
    operator=functional.layer_norm
    if _as_written(functional.layer_norm, "torch.nn.functional", "layer_norm")
    else None,
)


def refuses(owner: Any, hidden_states: torch.Tensor, norm: Any) -> str | None:
    """Return why this call must run the upstream code, or None.

    Args:
        owner: the module whose method calls the norm.
        hidden_states: what it is called with.
        norm: what is called. A subclass or a wrapped module (FSDP2 changes the class of modules that it
            shards by themselves) may do more in a call.
    """
    reason = refuses_norm(norm)
    return reason if reason is not None else not_plain(hidden_states) or untraceable()


def refuses_norm(norm: Any) -> str | None:
    """Return why a call of ``norm`` must not be skipped, or None."""
    kind = type(norm)
    if kind is not nn.LayerNorm:
        return f"the norm is a {kind.__module__}.{kind.__qualname__}, not torch's LayerNorm"
    if (seen := call_is_seen(norm)) is not None:
        return f"the norm {seen}, which a kernel would skip"
    if getattr(kind.forward, "__code__", None) is not _TORCHS.forward:
        return "torch.nn.LayerNorm.forward was replaced"
    return (
        None if functional.layer_norm is _TORCHS.operator else "torch.nn.functional.layer_norm was replaced"
    )

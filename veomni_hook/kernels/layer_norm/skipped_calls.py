"""Decides whether the call of a ``nn.LayerNorm`` may be skipped: only if it does nothing but compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.nn import functional

from veomni_hook.kernels.selection.binding import wanted_by
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.shared.module_calls import call_is_seen
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.origin import written_in

__all__ = ["chosen_apart", "refuses"]


#: Torch's own code; None if it was replaced before this module was imported: then every call is refused. As
#: attributes, which dynamo guards on.
_TORCHS = SimpleNamespace(
    forward=nn.LayerNorm.forward.__code__
    if written_in(nn.LayerNorm.forward) == (nn.LayerNorm.__module__, "LayerNorm.forward")
    else None,
    operator=functional.layer_norm
    if written_in(functional.layer_norm) == ("torch.nn.functional", "layer_norm")
    else None,
)


def refuses(owner: object, *operands: Any) -> str | None:
    """Return why this call must run the upstream code, or None.

    Args:
        owner: the module whose method calls the norm.
        operands: what the norm is called with, or two addends (or tensors from which they are computed); and
            what is called. A subclass or a wrapped module (FSDP2 changes the class of modules that it shards
            by themselves) may do more in a call.
    """
    *tensors, norm = operands
    kind = type(norm)
    if kind is not nn.LayerNorm:
        return f"the norm is a {kind.__module__}.{kind.__qualname__}, not torch's LayerNorm"
    if (seen := call_is_seen(norm)) is not None:
        return f"the norm {seen}, which a kernel would skip"
    if getattr(kind.forward, "__code__", None) is not _TORCHS.forward:
        return "torch.nn.LayerNorm.forward was replaced"
    if functional.layer_norm is not _TORCHS.operator:
        return "torch.nn.functional.layer_norm was replaced"
    return not_plain(*tensors) or untraceable()


def chosen_apart(owner: object, *_: object) -> str | None:
    """Return why ``auto`` leaves the norm to its own kernel (one was selected by name), or None."""
    chosen = wanted_by(owner, "nn_layer_norm") if isinstance(owner, nn.Module) else AUTO
    if chosen == AUTO:
        return None
    return f"nn_layer_norm={chosen} is chosen, and a fused kernel would bypass it"

"""What every kernel of attention asks of a call before it looks at masks."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from veomni_hook.kernels.shared.operand_checks import dtype_of, not_plain, untraceable

__all__ = ["refuses_call"]

_CAPTURING = "transformers.utils.output_capturing"


def refuses_call(
    owner: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: Any,
    dtypes: Collection[torch.dtype],
) -> str | None:
    """Return why a kernel that stores no weights, and computes in ``dtypes``, refuses a call, or None."""
    if (reason := not_plain(query, key, value) or untraceable()) is not None:
        return reason
    if query.shape[2] == 1:
        return "there is one query: decoding"
    if dropout > 0 and owner.training:
        return f"the attention has dropout ({dropout}), which the kernel does not support"
    if (reader := _reads_weights(owner)) is not None:
        return f"{reader} reads the attention weights, which the kernel does not store"
    found = [dtype_of(tensor) for tensor in (query, key, value)]
    if found[0] not in dtypes or found[1] != found[0] or found[2] != found[0]:
        return f"query, key and value are {found[0]}, {found[1]} and {found[2]}"
    return None


def _reads_weights(owner: Any) -> str | None:
    """Return what would read the weights that upstream's attention returns, or None."""
    if is_dynamo_compiling():
        # What transformers' hooks want is not known while tracing.
        return "a forward hook of the module" if len(owner._forward_hooks) else None
    for hook in owner._forward_hooks.values():
        if getattr(hook, "__module__", "") != _CAPTURING:
            return "a forward hook of the module"
        # These hooks stay after any output was requested once. Their collector says what is wanted now.
        collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
        wanted = None if collector is None else collector.get()
        if wanted is not None and any("attentions" in name for name in wanted):
            return "output_attentions"
    return None

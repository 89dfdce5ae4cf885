"""Whether a kernel may compute a call of a causal convolution."""

from __future__ import annotations

import torch

from veomni_hook.kernels.shared.hub_functions import is_upstreams
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.origin import name_of
from veomni_hook.kernels.shared.samples import unfit_ends

__all__ = ["refuses"]

_ACTIVATIONS = (None, "silu", "swish")


def refuses(
    owner: object,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
    upstream: object,
) -> str | None:
    """Return why this call must run the upstream code, or None. Operands: see `reference.depthwise`."""
    if not is_upstreams(upstream, owner):
        return f"the function was replaced by {name_of(upstream)}"
    optional = [tensor for tensor in (bias, cu_seqlens) if tensor is not None]
    if (reason := not_plain(hidden_states, weight, *optional) or untraceable()) is not None:
        return reason
    if activation not in _ACTIVATIONS:
        return f"the activation is {activation}"
    if hidden_states.dim() != 3 or weight.dim() != 2 or weight.shape[0] != hidden_states.shape[1]:
        return f"the input is {list(hidden_states.shape)}, the weight {list(weight.shape)}"
    if cu_seqlens is None:
        return None
    return unfit_ends(cu_seqlens, hidden_states.shape[0] * hidden_states.shape[2])

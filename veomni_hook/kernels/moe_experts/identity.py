"""Expert layers in which some experts are the identity; another kernel computes the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veomni_hook.kernels.shared.module_calls import call_is_seen
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["experts_or_identity", "identity_refuses"]


def experts_or_identity(
    gated: Callable[..., Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor | None,
    down_proj: Tensor | None,
    act_fn: Any,
    num_experts: int,
    identity: Any = None,
) -> Tensor:
    """Compute ``gated`` for ids below ``num_experts``; every other id is an identity expert.

    ``gated`` computes `reference.gated`, and skips ids without an expert.
    """
    own = gate_up_proj is not None and down_proj is not None
    past = top_k_index >= (num_experts if own else 0)
    share = torch.where(past, top_k_weights, 0).sum(-1, keepdim=True)
    same = (hidden_states * share).to(hidden_states.dtype)
    if gate_up_proj is None or down_proj is None:
        return same
    stacked = gate_up_proj[:num_experts], down_proj[:num_experts]
    return same + gated(hidden_states, top_k_index, top_k_weights, *stacked, act_fn)


def identity_refuses(refuses: Callable[..., str | None], owner: object, *operands: Any) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run; ``refuses`` checks ``gated``."""
    *tensors, activation, num_experts = operands[:7]
    if len(operands) > 7 and operands[7] is not None and (seen := call_is_seen(operands[7])) is not None:
        return f"the identity expert {seen}"
    if tensors[3] is None or tensors[4] is None:
        return not_plain(*tensors[:3]) or untraceable()
    if type(num_experts) is not int or num_experts > min(len(tensors[3]), len(tensors[4])):
        return f"num_experts is {num_experts!r}"
    stacked = (tensor[:num_experts].detach() for tensor in tensors[3:])
    return refuses(owner, *tensors[:3], *stacked, activation)

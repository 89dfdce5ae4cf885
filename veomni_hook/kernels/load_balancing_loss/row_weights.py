"""Shared by the backends of the load-balancing loss: row weights, the final sum, operand checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["balanced", "loss_of", "refuses"]


def balanced(
    loss: Callable[..., torch.Tensor],
    low: bool,
    gate_logits: tuple[torch.Tensor, ...],
    num_experts: int,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``softmax_topk``, or ``softmax_topk_in_dtype`` if ``low``, of what `reference` takes.

    ``loss`` takes the rows' weights or None, the number of experts of a token, the dtype of probabilities,
    that of means or None, and the logits of each layer. It returns a float32 scalar.
    """
    first, mask = gate_logits[0], attention_mask
    kept = None if mask is None else mask.reshape(-1).to(first.device, torch.float32).contiguous()
    means = _probabilities(first, mask) if low else None
    return loss(kept, top_k, _probabilities(first), means, *gate_logits)


def _probabilities(logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.dtype:
    """Return the dtype of probabilities weighted by ``mask``: autocast computes a softmax in float32."""
    kind = logits.device.type
    dtype = logits.dtype
    if torch.is_autocast_enabled(kind) and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    return dtype if mask is None else torch.promote_types(dtype, mask.dtype)


def loss_of(
    sums: torch.Tensor, kept: torch.Tensor | None, layers: Sequence[torch.Tensor], low: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and its gradient with respect to the sums of probabilities.

    ``sums`` is ``[2, experts]`` in float32: how often each was chosen, and its probabilities. ``low`` is the
    dtype to which upstream rounds means: after the division and, with a mask, also after the sum.
    """
    number = len(layers)
    rows = number * layers[0].shape[0] if kept is None else kept.sum() * number
    chosen, probabilities = sums.unbind()
    if low is None:
        means = probabilities / rows
    elif kept is None:
        means = (probabilities / rows).to(low)
    else:
        means = (probabilities.to(low) / rows).to(low)
    slope = chosen / rows * sums.shape[1]
    return (slope * means).sum(), slope / rows


def refuses(
    owner: object, gate_logits: Any, num_experts: object, top_k: object, mask: Any = None, *upstream: object
) -> str | None:
    """Return why only the upstream code can take these operands, or None."""
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return "the logits are not a tuple with a tensor for each layer"
    if not isinstance(num_experts, int) or not isinstance(top_k, int):
        return "num_experts or top_k is not an int"
    return (
        not_plain(*gate_logits)
        or untraceable()
        or _layers_refuse(gate_logits, num_experts, top_k)
        or (None if mask is None else not_plain(mask) or _mask_refuses(mask, gate_logits[0].shape[0]))
    )


def _layers_refuse(layers: Sequence[torch.Tensor], num_experts: int, top_k: int) -> str | None:
    first = layers[0]
    kinds = {(layer.shape, layer.dtype, layer.device) for layer in layers}
    if len(kinds) > 1:
        return "the layers' logits differ in shape, dtype or device"
    if first.ndim != 2 or first.shape[1] != num_experts or not 0 < top_k <= num_experts:
        return "the logits are not [tokens, num_experts], or top_k is out of range"
    return None if first.is_floating_point() else f"the logits have dtype {first.dtype}"


def _mask_refuses(mask: torch.Tensor, tokens: int) -> str | None:
    if mask.ndim != 2 or mask.numel() != tokens:
        return "the attention mask is not [batch, length] with a number for each token"
    if mask.is_floating_point() and mask.dtype is not torch.float32:
        return f"the attention mask has dtype {mask.dtype}"
    return "the attention mask requires a gradient" if mask.requires_grad else None

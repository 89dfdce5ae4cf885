"""What verl's fused head calls: `token_log_probs` with the operands of verl's autograd function.

A spec, ``shared/verl_utils_experimental_torch_functional.py``, puts the call there. verl's function runs
where settings choose ``eager``, and where ours cannot, with a warning.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.kernels.linear_cross_entropy.functional import is_eager, token_log_probs
from veomni_hook.kernels.linear_cross_entropy.head import unsuited
from veomni_hook.kernels.linear_cross_entropy.trainer_head import parameters_of
from veomni_hook.kernels.shared.function_modes import intercepting
from veomni_hook.kernels.shared.operand_checks import not_plain

__all__ = ["log_probs", "told"]

_PARAMETERS = ("ctx", "hidden_states", "vocab_weights", "input_ids", "temperature", "chunk_size")

#: How often our function ran in this process (None), and verl's for a reason.
_CALLS: Counter[str | None] = Counter()


def log_probs(function: Any, *operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``function.apply(*operands)`` does, from `token_log_probs` where it computes this.

    Args:
        function: verl's autograd function.
        operands: hidden states ``[..., hidden]``, weight ``[vocab, hidden]``, the token that each position
            predicts ``[...]`` int64 (no value is ignored), temperature, and the rows of verl's chunks.

    Returns:
        Log-probabilities ``[...]``, float32, and entropies ``[...]`` in the dtype of the hidden states, as
        verl has them; both with gradients. The weight's gradient is summed in float32.

    Raises:
        KernelError: the temperature is not a positive number, or a backend that was chosen by name cannot
            compute this.
    """
    if torch.compiler.is_compiling():
        own: tuple[torch.Tensor, torch.Tensor] = function.apply(*operands)
        return own
    reason = "eager is chosen" if is_eager() else _refuses(function, operands)
    _CALLS[reason] += 1
    if reason is not None:
        if _CALLS[reason] == 1 and not is_eager():
            warnings.warn(
                f"verl's own function computes log-probabilities, not veomni_hook's: {reason}",
                VeomniHookWarning,
                stacklevel=4,
            )
        own = function.apply(*operands)
        return own
    hidden, weight, tokens, temperature, _ = operands
    # No token has this number, so every position counts.
    statistics = token_log_probs(
        hidden, weight, tokens, temperature, ignore_index=-1, entropy=True, accumulate="float32"
    )
    assert statistics.log_probs is not None and statistics.entropy is not None  # noqa: S101 - both are asked for
    return statistics.log_probs, statistics.entropy.to(hidden.dtype)


def told() -> dict[str | None, int]:
    """Return how often our function ran in this process (None), and verl's for each reason."""
    return dict(_CALLS)


def _refuses(function: type[torch.autograd.Function], operands: tuple[Any, ...]) -> str | None:
    """Return why verl's function computes this, or None."""
    if tuple(parameters_of(function)) != _PARAMETERS or len(operands) != len(_PARAMETERS) - 1:
        return "its parameters are not those that this release of veomni-hook knows"
    hidden, weight, tokens, _, _ = operands
    if hasattr(weight, "ds_id"):
        return "DeepSpeed holds the weight of the head"
    return intercepting() or not_plain(tokens) or unsuited(hidden, weight, None)

"""What TRL's fused head calls: `token_log_probs` with the operands of TRL's autograd function.

A spec, ``shared/trl_trainer_utils.py``, puts the calls there. TRL's function computes what ours does not, and
runs where settings choose ``eager``. `told` says for `explain` which of them ran.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from veomni_hook.kernels.linear_cross_entropy.functional import is_eager, token_log_probs
from veomni_hook.kernels.linear_cross_entropy.head import unsuited
from veomni_hook.kernels.shared.function_modes import intercepting
from veomni_hook.kernels.shared.operand_checks import not_plain

__all__ = ["compacts", "log_probs", "parameters_of", "told"]

_PARAMETERS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
    "logit_scale", "outputs",
)  # fmt: skip
#: What TRL's function returns after the log-probabilities, in this order.
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

#: For each model, how often our function ran (None), and TRL's for a reason.
_CALLS: WeakKeyDictionary[Any, Counter[str | None]] = WeakKeyDictionary()


def compacts(use_triton: Callable[[torch.device], bool], device: torch.device) -> bool:
    """Return whether TRL's head passes only the positions that have a label.

    TRL does so on devices where it has Triton. On a CPU every position costs time, and shapes may vary.
    """
    if device.type == "cpu" and not torch.compiler.is_compiling() and not is_eager():
        return True
    return use_triton(device)


def log_probs(model: object, function: Any, *operands: Any) -> tuple[torch.Tensor | None, ...]:
    """Return what ``function.apply(*operands)`` does, from `token_log_probs` where it computes this.

    Args:
        model: the model that is called; `told` reports its calls.
        function: TRL's autograd function.
        operands: hidden states ``[rows, hidden]``, weight ``[vocab, hidden]``, bias ``[vocab]`` or None,
            targets ``[rows]`` int64, temperature, the width of TRL's tiles, soft cap or None, scale, and the
            names of the outputs.

    Returns:
        Log-probabilities, entropies, ``log(sum p^2)``, means of the logits, and whether the target is the
        most probable token: ``[rows]`` each, float32 and bool; None if not named. Gradients of weights are
        summed in float32, as TRL does.

    Raises:
        KernelError: a backend that was chosen by name cannot compute this.
    """
    if torch.compiler.is_compiling():
        own: tuple[torch.Tensor | None, ...] = function.apply(*operands)
        return own
    reason = _refuses(function, operands)
    _CALLS.setdefault(model, Counter())[reason] += 1
    if reason is not None:
        own = function.apply(*operands)
        return own
    hidden, weight, bias, targets, temperature, _, softcap, scale, outputs = operands
    statistics = token_log_probs(
        hidden, weight, targets, temperature, bias=bias, softcap=softcap,
        scale=None if scale == 1 else scale, entropy="entropy" in outputs,
        predictions="is_top1" in outputs, accumulate="float32",
    )  # fmt: skip
    mean = None
    if "mean_logits" in outputs:
        mean = _mean_logits(hidden, weight, bias) * (scale / temperature)
    hits = None if statistics.predictions is None else statistics.predictions == targets
    return statistics.log_probs, statistics.entropy, None, mean, hits


def told(model: object) -> dict[str | None, int]:
    """Return how often our function ran for ``model`` (None), and TRL's for each reason."""
    return dict(_CALLS.get(model, {}))


def _refuses(function: Any, operands: tuple[Any, ...]) -> str | None:
    """Return why TRL's function computes this, or None."""
    parameters = parameters_of(function)
    known = tuple(parameters) == _PARAMETERS and parameters["outputs"] == _OUTPUTS
    if not known or len(operands) != len(_PARAMETERS) - 1:
        return "the parameters of TRL's function are not those that this release of veomni-hook knows"
    if is_eager():
        return "eager is chosen"
    hidden, weight, bias, targets, _, _, softcap, scale, outputs = operands
    reason = intercepting() or next(_not_computed(softcap, scale, outputs), None)
    if reason is None and hasattr(weight, "ds_id"):
        reason = "DeepSpeed gathers the weight of the head inside TRL's function"
    return reason or not_plain(targets) or unsuited(hidden, weight, bias)


def _not_computed(softcap: Any, scale: object, outputs: Any) -> Iterator[str]:
    """Yield what our kernel does not compute."""
    if unknown := [name for name in outputs if name not in ("log_probs", *_OUTPUTS)]:
        yield f"unknown outputs: {', '.join(unknown)}"
    if "log_sum_sq_probs" in outputs:
        yield "log_sum_sq_probs (use_weighting) is not computed by our kernel"
    if softcap is not None and "mean_logits" in outputs:
        yield "mean_logits of capped logits are not computed by our kernel"
    if not isinstance(scale, (int, float)):
        yield f"the scale of the logits is a {type(scale).__name__}"


@lru_cache(maxsize=8)
def parameters_of(function: type[torch.autograd.Function]) -> dict[str, object]:
    """Return the parameters of a trainer's function with their defaults; none if they cannot be read."""
    try:
        parameters = inspect.signature(function.forward).parameters
    except (AttributeError, TypeError, ValueError):
        return {}
    return {name: parameter.default for name, parameter in parameters.items()}


@torch.no_grad()
def _mean_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of each row's logits in float32: the product with the mean row of the weight."""
    means = (hidden * weight.mean(0, dtype=torch.float32)).sum(-1)
    return means if bias is None else means + bias.mean(dtype=torch.float32)

"""Checks on the operands of LayerNorm; the table has those of every variant, after ``hidden_states``."""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.kernels.shared.operand_checks import not_plain

__all__ = ["OPERANDS", "unfit"]

OPERANDS = {
    "weight_before_cast": ("weight", "eps"),
    "cast_before_weight_and_bias": ("weight", "bias", "eps"),
    "operator_before_weight_and_bias": ("normalized_shape", "weight", "bias", "eps"),
    "weight_and_bias_before_cast": ("normalized_shape", "weight", "bias", "eps"),
    "unweighted": ("normalized_shape", "eps"),
}
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def unfit(variant: str, hidden_states: torch.Tensor, operands: tuple[Any, ...]) -> str | None:
    """Return why no kernel can take this call of a variant, or None."""
    named = dict(zip(OPERANDS[variant], operands, strict=True))
    parameters = [named[name] for name in ("weight", "bias") if name in named]
    reason = not_plain(hidden_states, *parameters) or _unfit_input(hidden_states, named)
    if reason is not None:
        return reason
    for parameter in parameters:
        reason = _unfit_parameter(hidden_states, parameter)
        if reason is not None:
            return reason
    if parameters and parameters[0].shape != parameters[-1].shape:
        return "weight and bias have different shapes"
    return _other_result(variant, hidden_states, parameters)


def _unfit_input(hidden_states: torch.Tensor, named: dict[str, Any]) -> str | None:
    shape = hidden_states.shape
    if hidden_states.layout is not torch.strided or not shape:
        return "the input is not a strided tensor with a dimension"
    if hidden_states.dtype not in _DTYPES:
        return f"the input has dtype {hidden_states.dtype}"
    if not isinstance(named["eps"], (float, int)):
        return f"eps is a {type(named['eps']).__name__}"
    if "normalized_shape" in named and tuple(named["normalized_shape"]) != tuple(shape[-1:]):
        return "the norm is not over the last dimension alone"
    return None


def _unfit_parameter(hidden_states: torch.Tensor, parameter: torch.Tensor) -> str | None:
    if parameter.dtype not in _DTYPES:
        return f"a parameter has dtype {parameter.dtype}"
    if parameter.device != hidden_states.device:
        return f"a parameter is on {parameter.device}, the input on {hidden_states.device}"
    if parameter.ndim not in (1, 2) or parameter.shape != hidden_states.shape[-parameter.ndim :]:
        return "a parameter does not match the last dimensions of the input"
    return None if parameter.is_contiguous() else "a parameter is not contiguous"


def _other_result(variant: str, hidden_states: torch.Tensor, parameters: list[torch.Tensor]) -> str | None:
    """Why torch's operator, which upstream calls, gives no result or one of another dtype."""
    if variant == "operator_before_weight_and_bias":
        if hidden_states.dtype is not torch.float32 and torch.is_autocast_enabled(hidden_states.device.type):
            return f"under autocast, upstream normalises {hidden_states.dtype} input in float32"
    elif variant == "weight_and_bias_before_cast" and any(
        parameter.dtype is not torch.float32 or parameter.ndim != 1 for parameter in parameters
    ):
        return "upstream's operator takes parameters of one dimension in float32"
    return None

"""Checks on the operands of LayerNorm: ``[normalized_shape], [weight], [bias], eps``, after the input."""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain

__all__ = ["unfit"]

#: The variants in which torch's operator is written, so that the first operand is its ``normalized_shape``.
_SHAPED = frozenset(("operator_before_weight_and_bias", "weight_and_bias_before_cast", "unweighted"))


def unfit(variant: str, hidden_states: torch.Tensor, operands: tuple[Any, ...]) -> str | None:
    """Return why no kernel can take this call of a variant, or None."""
    shaped = variant in _SHAPED
    parameters, eps = operands[shaped:-1], operands[-1]
    reason = not_plain(hidden_states, *parameters) or _unfit_input(hidden_states, eps)
    if reason is not None:
        return reason
    if shaped and tuple(operands[0]) != tuple(hidden_states.shape[-1:]):
        return "the norm is not over the last dimension alone"
    for parameter in parameters:
        reason = _unfit_parameter(hidden_states, parameter)
        if reason is not None:
            return reason
    if parameters and parameters[0].shape != parameters[-1].shape:
        return "weight and bias have different shapes"
    return _other_result(variant, hidden_states, parameters) if shaped else None


def _unfit_input(hidden_states: torch.Tensor, eps: object) -> str | None:
    if hidden_states.layout is not torch.strided or not hidden_states.ndim:
        return "the input is not a strided tensor with a dimension"
    if hidden_states.dtype not in DTYPES:
        return f"the input has dtype {hidden_states.dtype}"
    return None if isinstance(eps, (float, int)) else f"eps is a {type(eps).__name__}"


def _unfit_parameter(hidden_states: torch.Tensor, parameter: torch.Tensor) -> str | None:
    if parameter.dtype not in DTYPES:
        return f"a parameter has dtype {parameter.dtype}"
    if parameter.device != hidden_states.device:
        return f"a parameter is on {parameter.device}, the input on {hidden_states.device}"
    if parameter.ndim not in (1, 2) or parameter.shape != hidden_states.shape[-parameter.ndim :]:
        return "a parameter does not match the last dimensions of the input"
    return None if parameter.is_contiguous() else "a parameter is not contiguous"


def _other_result(
    variant: str, hidden_states: torch.Tensor, parameters: tuple[torch.Tensor, ...]
) -> str | None:
    """Why torch's operator, which upstream calls, gives no result or one of another dtype."""
    if variant == "operator_before_weight_and_bias":
        if hidden_states.dtype is not torch.float32 and torch.is_autocast_enabled(hidden_states.device.type):
            return f"under autocast, upstream normalises {hidden_states.dtype} input in float32"
    elif variant == "weight_and_bias_before_cast" and any(
        parameter.dtype is not torch.float32 or parameter.ndim != 1 for parameter in parameters
    ):
        return "upstream's operator takes parameters of one dimension in float32"
    return None

"""Calls of torch's ``nn.LayerNorm`` with the kernels of `veomni_hook.kernels.layer_norm.triton`.

Everything is computed in float32 and rounded once, as in torch's operator. Under autocast on a GPU, this
operator casts its operands to float32, and so its result has this dtype; the kernel reads the operands as
they are, without copies in float32, and returns the same.

Shapes: hidden_states, or residual and hidden_states, [..., hidden]; weight, bias [hidden] or None.
"""

from __future__ import annotations

import torch
from torch import nn

from veomni_hook.kernels.layer_norm import reference
from veomni_hook.kernels.layer_norm.triton import added_norm
from veomni_hook.kernels.layer_norm.triton import norm as plain_norm
from veomni_hook.kernels.rms_norm.tiles import MOST_COLUMNS
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain, unfit_addends, untraceable

__all__ = ["cast_by_autocast", "loses", "refuses", "refuses_sum", "rounded_once", "sum_rounded_once"]

#: Under `auto`, calls with a smaller input run torch's operator, whose launches cost the host less. On an
#: H200's host, forward and backward took 97 us more than torch's; its GPU saved 39 us in them at 8,192 x
#: 1,152 in bfloat16 and 78 us at 8,192 x 4,096, 1.2 us for each MB: as much as that at 84 MB, and this is
#: half as much again. In steps that wait for the GPU, smaller inputs win, too.
LEAST_BYTES = 128 << 20


def rounded_once(hidden_states: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    """Return what ``norm`` makes of ``hidden_states`` ``[..., hidden]``."""
    weight, bias = _parameters(norm)
    out = torch.float32 if cast_by_autocast(hidden_states) else hidden_states.dtype
    return plain_norm(hidden_states, weight, bias, norm.eps, torch.float32, torch.float32, out)


def sum_rounded_once(
    residual: torch.Tensor, hidden_states: torch.Tensor, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and what ``norm`` makes of it; the reference computes unsupported operands."""
    # The addends may be computed only after the kernel was selected.
    if (
        not_plain(residual, hidden_states)
        or untraceable()
        or refuses_sum(None, residual, hidden_states, norm)
    ):
        return reference.sum_rounded_once(residual, hidden_states, norm)
    weight, bias = _parameters(norm)
    out = torch.float32 if cast_by_autocast(residual) else residual.dtype
    return added_norm(residual, hidden_states, weight, bias, norm.eps, out)


def _parameters(norm: nn.LayerNorm) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the weight and the bias, which may be other tensors than parameters (FSDP sets some)."""
    found = norm._parameters
    weight, bias = found.get("weight"), found.get("bias")
    return (norm.weight if weight is None else weight), (norm.bias if bias is None else bias)


def cast_by_autocast(hidden_states: torch.Tensor) -> bool:
    """Return whether torch's operator would cast its operands to float32; on a CPU, autocast leaves them."""
    return hidden_states.is_cuda and torch.is_autocast_enabled("cuda")


def refuses_sum(
    owner: object, residual: torch.Tensor, hidden_states: torch.Tensor, norm: nn.LayerNorm
) -> str | None:
    """`refuses` for a sum."""
    return unfit_addends(residual, hidden_states) or refuses(None, residual, norm)


def loses(owner: object, hidden_states: torch.Tensor, *_: object) -> str | None:
    """Return why torch's operator, of a sum if there are two addends, is faster for this call, or None."""
    if hidden_states.nbytes < LEAST_BYTES:
        return f"torch's operator costs the host less, and the input has less than {LEAST_BYTES >> 20} MiB"
    return None


def refuses(owner: object, hidden_states: torch.Tensor, norm: nn.LayerNorm) -> str | None:
    """Return why the kernels cannot take plain input of a plain norm, beside `skipped_calls`, or None."""
    weight, bias = _parameters(norm)
    shape, dtype = hidden_states.shape, hidden_states.dtype
    # One expression for the usual case, because each call takes time.
    if (
        weight is not None
        and bias is not None
        and dtype is weight.dtype
        and dtype is bias.dtype
        and shape
        and weight.shape == bias.shape == norm.normalized_shape == (shape[-1],)
        and shape[-1] <= MOST_COLUMNS
        and dtype in DTYPES
        and type(norm.eps) is float
        and hidden_states.layout is torch.strided
        and weight.is_contiguous()
        and bias.is_contiguous()
        and hidden_states.device == weight.device == bias.device
    ):
        return not_plain(weight, bias)
    given = {"weight": weight, "bias": bias}
    reasons = (_unfit_parameter(hidden_states, *each) for each in given.items())
    return _unfit_input(hidden_states, norm) or next(filter(None, reasons), None)


def _unfit_input(hidden_states: torch.Tensor, norm: nn.LayerNorm) -> str | None:
    shape = hidden_states.shape
    if hidden_states.layout is not torch.strided or hidden_states.dtype not in DTYPES:
        return f"the input has dtype {hidden_states.dtype} or is not strided"
    if not shape or tuple(norm.normalized_shape) != tuple(shape[-1:]):
        return "the norm is not over the last dimension alone"
    if shape[-1] > MOST_COLUMNS:
        return f"the kernel supports rows of at most {MOST_COLUMNS} values"
    return None if isinstance(norm.eps, (float, int)) else f"eps is a {type(norm.eps).__name__}"


def _unfit_parameter(hidden_states: torch.Tensor, name: str, given: torch.Tensor | None) -> str | None:
    if given is None:
        return None
    if (reason := not_plain(given)) is not None:
        return reason
    # Of another dtype, torch's operator on a GPU raises an error, unless autocast casts all operands.
    if given.dtype is not hidden_states.dtype and not (
        given.dtype in DTYPES and cast_by_autocast(hidden_states)
    ):
        return f"the {name} has dtype {given.dtype}, the input {hidden_states.dtype}"
    if given.device != hidden_states.device:
        return f"the {name} is on {given.device}, the input on {hidden_states.device}"
    if given.shape != hidden_states.shape[-1:] or not given.is_contiguous():
        return f"the {name} is not one contiguous row"
    return None

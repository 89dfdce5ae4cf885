"""Whether a package that the user has installed computes a call of the gated delta rule."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from veomni_hook.kernels.gated_delta_rule import operand_checks
from veomni_hook.kernels.shared import hub_functions

__all__ = ["yields"]

_LEAST_CAPABILITY = (8, 0)


def yields(owner: Any, *operands: Any) -> str | None:
    """Return the package's function that computes a call, because the user has installed it, or None.

    Where Triton computes the call, it takes precedence over flash-linear-attention: a step took 0.7 of the
    time with a decay for each head, or channel, and with Triton 3.4 to 3.7.0 the other's backward raises an
    error on Hopper.
    """
    reason = hub_functions.yields(owner, *operands)
    home = str(getattr(hub_functions.running(operands[-1]), "__module__", ""))
    if reason is None or home.partition(".")[0] != "fla" or not _runs_triton(operands[0].device):
        return reason
    from veomni_hook.kernels.gated_delta_rule import rule, triton

    if operands[3].dim() == 3:
        refused = operand_checks.refuses(owner, *operands) or triton.refuses(owner, *operands)
    else:  # a decay for each channel
        refused = operand_checks.refuses_channels(owner, *operands) or rule.unfit(owner, *operands)
    return reason if refused else None


def _runs_triton(device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY

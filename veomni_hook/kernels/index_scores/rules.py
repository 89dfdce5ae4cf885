"""Which calls any kernel of index scores can take."""

from __future__ import annotations

from torch import Tensor

from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["refuses"]


def refuses(owner: object, query: Tensor, key: Tensor, scale: object) -> str | None:
    """Return why this call must run the upstream code, or None.

    Weights are not known yet: upstream computes them later.
    """
    if (reason := not_plain(query, key) or untraceable()) is not None:
        return reason
    if query.ndim != 4 or key.ndim != 3 or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[2]):
        return f"shapes: query {[*query.shape]}, key {[*key.shape]}"
    if query.device != key.device:
        return "the operands are on different devices"
    if not (query.is_floating_point() and key.is_floating_point()):
        return "an operand does not consist of floating-point numbers"
    return None if type(scale) in (int, float) else f"the scale is a {type(scale).__name__}, not a number"

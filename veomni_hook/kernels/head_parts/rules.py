"""Which calls any kernel of parts of heads can take."""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain, untraceable

__all__ = ["refuses_joined", "refuses_split"]

# What upstream's names stand for; a user may put other functions there later.
_SPLIT, _CAT = torch.split, torch.cat


def refuses_split(owner: object, x: Any, sizes: Any, dim: object, function: object) -> str | None:
    """Return why this call must run the upstream code, or None."""
    if function is not _SPLIT:
        return "torch.split has been replaced"
    if (reason := _unsuited(x, dim)) is not None:
        return reason
    if type(sizes) not in (list, tuple) or len(sizes) != 2 or not all(type(size) is int for size in sizes):
        return "the sizes are not two numbers"
    if min(sizes) < 0 or sum(sizes) != x.shape[-1]:
        return "the sizes are not those of two parts"  # torch says what is wrong
    return None


def refuses_joined(owner: object, parts: Any, dim: object, function: object) -> str | None:
    """Return why this call must run the upstream code, or None."""
    if function is not _CAT:
        return "torch.cat has been replaced"
    if type(parts) not in (list, tuple) or len(parts) != 2:
        return "there are not two parts"
    x, y = parts
    if (reason := _unsuited(x, dim) or _unsuited(y, dim)) is not None:
        return reason
    if x.dtype is not y.dtype or x.device != y.device or x.shape[:-1] != y.shape[:-1]:
        return "the parts differ in dtype, device or shape"
    return None


def _unsuited(x: Any, dim: object) -> str | None:
    if (reason := not_plain(x) or untraceable()) is not None:
        return reason
    if dim != -1 or x.ndim != 4:
        return "it is not the last of four dimensions"
    if x.dtype not in DTYPES or x.layout is not torch.strided:
        return f"the kernel does not support {x.dtype}"
    return None

"""The operators of torch_npu, as kernels of the backend ``npu`` call them.

They are in ``torch.ops.npu`` once torch_npu is imported, which tensors on an Ascend device show. Nothing
else here knows torch_npu, so that everything can be run without it, on operators of the same schemas
(`tests/ascend`).
"""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.kernels.operands import not_plain, untraceable

__all__ = ["DTYPES", "call", "unfit"]

#: What its operators document, as far as kernels here use them.
DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def call(operator: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator of torch_npu; of several overloads the one without a name."""
    return getattr(torch.ops.npu, operator).default(*args, **kwargs)


def unfit(*tensors: Any) -> str | None:
    """Return why operators of torch_npu cannot take tensors, whatever they compute, or None."""
    reason = not_plain(*tensors) or untraceable()
    if reason is not None:
        return reason
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            return "an operand is not strided"
        if tensor.device != tensors[0].device:
            return f"operands are on {tensors[0].device} and {tensor.device}"
        if tensor.dtype not in DTYPES:
            return f"an operand is {tensor.dtype}"
    return None

"""Access to torch_npu's operators for kernels of the backend ``npu``.

The operators are in ``torch.ops.npu`` once torch_npu is imported; a tensor on an Ascend device implies that.
Nothing else here uses torch_npu, so everything can run without it, on operators with the same schemas
(`tests/ascend`).
"""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["DTYPES", "call", "unfit"]

#: The dtypes that its operators document, as far as kernels here use them.
DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def call(operator: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator of torch_npu; if it has several overloads, the unnamed one."""
    return getattr(torch.ops.npu, operator).default(*args, **kwargs)


def unfit(*tensors: Any) -> str | None:
    """Return why no operator of torch_npu can take these tensors, or None."""
    reason = not_plain(*tensors) or untraceable()
    if reason is not None:
        return reason
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            return "an operand is not a strided tensor"
        if tensor.device != tensors[0].device:
            return f"operands are on {tensors[0].device} and {tensor.device}"
        if tensor.dtype not in DTYPES:
            return f"an operand has dtype {tensor.dtype}"
    return None

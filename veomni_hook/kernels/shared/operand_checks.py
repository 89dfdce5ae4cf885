"""Checks on operands that several kernels make before they accept a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import compiler as _compiler
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

__all__ = [
    "DTYPES",
    "count_as_plain",
    "counted_as_plain",
    "counts_as_plain",
    "dtype_of",
    "not_plain",
    "unfit_addends",
    "untraceable",
    "wants_grad",
]

#: The dtypes that most kernels take.
DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
# To dynamo, a module's buffer has the type Buffer; elsewhere nothing does.
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Bound here, because every guard uses them and attribute lookups in torch took time.
_in_functorch = torch._C._are_functorch_transforms_active
_in_jit_trace = torch._C._get_tracing_state
# Marked on the class, not in a collection: kernels are imported while dynamo traces and guards collections.
_MARK = "_veomni_hook_reads_it"


def count_as_plain(kind: type[torch.Tensor]) -> None:
    """Let kernels read tensors of the subclass ``kind`` directly, but not those of its own subclasses."""
    setattr(kind, _MARK, kind)


def counts_as_plain(kind: type[torch.Tensor]) -> bool:
    """Return whether kernels read tensors of the class ``kind`` directly."""
    return kind in _PLAIN or getattr(kind, _MARK, None) is kind


@contextmanager
def counted_as_plain(kind: type[torch.Tensor]) -> Iterator[None]:
    """Let kernels read tensors of the subclass ``kind`` directly in the block."""
    count_as_plain(kind)
    try:
        yield
    finally:
        delattr(kind, _MARK)


def not_plain(*tensors: object) -> str | None:
    """Return why a kernel must not read one of ``tensors`` directly (DTensor, fake, proxy), or None."""
    for tensor in tensors:
        kind = type(tensor)
        if kind not in _PLAIN and getattr(kind, _MARK, None) is not kind:
            return f"an operand is a {kind.__name__}, not a plain tensor"
    return None


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which torch's products compute ``tensor``: autocast changes it."""
    device = tensor.device.type
    if tensor.is_floating_point() and torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def untraceable() -> str | None:
    """Return why code with its own backward must not run now (torch.func, jit.trace, dual numbers)."""
    # As `torch.compiler.is_compiling`, which takes two calls.
    if is_dynamo_compiling() or _compiler._is_compiling_flag:
        return None  # traced into one graph; dynamo cannot trace the checks below
    if _in_functorch():
        return "a torch.func transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if _in_jit_trace() is not None:
        return "torch.jit.trace is active"
    return None


def unfit_addends(residual: torch.Tensor, hidden_states: torch.Tensor) -> str | None:
    """Return why a kernel that reads two addends by one shape and dtype cannot take these, or None."""
    if residual.shape != hidden_states.shape:
        return "the two addends have different shapes"
    if residual.dtype is not hidden_states.dtype:
        return f"the two addends have the dtypes {residual.dtype} and {hidden_states.dtype}"
    if residual.device != hidden_states.device:
        return "the two addends are on different devices"
    if hidden_states.layout is not torch.strided:
        return "the two addends are not strided tensors"
    return None


def wants_grad(*tensors: torch.Tensor) -> bool:
    """Return whether autograd will record an operation on ``tensors``."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

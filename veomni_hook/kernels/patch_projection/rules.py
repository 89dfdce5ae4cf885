"""Which calls of a convolution are one product: disjoint blocks, and nothing that a call does besides."""

from __future__ import annotations

from types import BuiltinFunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from veomni_hook.kernels.shared.module_calls import call_is_seen, parameter
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain, untraceable
from veomni_hook.kernels.shared.origin import written_in

__all__ = ["loses", "refuses"]

_DTYPES = DTYPES | {torch.float64}


def _torchs(kind: type[Any]) -> SimpleNamespace:
    """Torch's own code for a class; None for what was replaced before this module was imported."""
    namespace = SimpleNamespace(operator=getattr(functional, kind.__name__.lower()))
    if type(namespace.operator) is not BuiltinFunctionType:
        namespace.operator = None
    for name in ("forward", "_conv_forward"):
        function = getattr(kind, name)
        as_written = written_in(function) == (kind.__module__, f"{kind.__name__}.{name}")
        setattr(namespace, name, function.__code__ if as_written else None)
    return namespace


#: As attributes, which dynamo guards on.
_TORCHS = SimpleNamespace(**{kind.__name__: _torchs(kind) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)})


def refuses(owner: object, x: torch.Tensor, convolution: Any) -> str | None:
    """Return why this call must run the upstream code, or None.

    Args:
        owner: the module whose method calls the convolution.
        x: what it is called with.
        convolution: what is called. A subclass or a wrapped module may do more in a call.
    """
    reason = _call_matters(convolution)
    if reason is None:
        reason = not_plain(x) or untraceable() or _overlaps(convolution)
    return reason if reason is not None else _unfit(x, convolution)


def loses(owner: object, x: torch.Tensor, convolution: Any) -> str | None:
    """Return why torch's convolution is or may be faster for this call, or None."""
    # Rows of several blocks are a copy. On a CPU (one thread of an AMD EPYC, float32, 224 x 224), steps took
    # 1.1 times as long as torch's with blocks of 16 x 16, and twice as long with 4 x 4. On an H200 (bfloat16,
    # 64 images of 336 x 336, blocks of 14 x 14) they took 0.44 of the time.
    if not x.is_cuda and tuple(x.shape[2:]) != tuple(convolution.kernel_size):
        return "the input has several blocks, which have to be copied"
    if x.is_cuda and x.dtype is torch.float32:
        backends = torch.backends
        if backends.cudnn.allow_tf32 and not backends.cuda.matmul.allow_tf32:
            return "torch's convolutions may round to TF32 here, and its products may not"
    return None


def _call_matters(convolution: Any) -> str | None:
    kind = type(convolution)
    if kind is not nn.Conv3d and kind is not nn.Conv2d and kind is not nn.Conv1d:
        return f"the convolution is a {kind.__module__}.{kind.__qualname__}, not torch's"
    if (seen := call_is_seen(convolution)) is not None:
        return f"the convolution {seen}, which a kernel would skip"
    name = kind.__name__
    torchs = getattr(_TORCHS, name)
    if getattr(kind.forward, "__code__", None) is not torchs.forward:
        return f"torch.nn.{name}.forward was replaced"
    inner = getattr(convolution, "_conv_forward", None)
    if getattr(inner, "__code__", None) is not torchs._conv_forward:
        return f"torch.nn.{name}._conv_forward was replaced"
    if getattr(functional, name.lower()) is not torchs.operator:
        return f"torch.nn.functional.{name.lower()} was replaced"
    return None


def _overlaps(convolution: Any) -> str | None:
    """Return why the convolution is not one over disjoint blocks, or None."""
    kernel, stride, padding = convolution.kernel_size, convolution.stride, convolution.padding
    if tuple(stride) != tuple(kernel):
        return f"the convolution's stride is {stride}, its kernel {kernel}"
    if padding != "valid" and (isinstance(padding, str) or any(padding)):
        return f"the convolution pads its input by {padding}"
    if any(width != 1 for width in convolution.dilation):
        return f"the convolution has dilation {convolution.dilation}"
    return None if convolution.groups == 1 else f"the convolution has {convolution.groups} groups"


def _unfit(x: torch.Tensor, convolution: Any) -> str | None:
    kernel = tuple(convolution.kernel_size)
    if x.ndim != len(kernel) + 2 or x.layout is not torch.strided or x.dtype not in _DTYPES:
        return f"the input is a {x.layout} tensor of {x.ndim} dimensions and {x.dtype}"
    if any(size < width for size, width in zip(x.shape[2:], kernel, strict=True)):
        return "the input is smaller than the kernel"
    weight, bias = parameter(convolution, "weight"), parameter(convolution, "bias")
    reason = _other(x, "weight", weight, (weight.shape[0], x.shape[1], *kernel))
    if reason is None and bias is not None:
        reason = _other(x, "bias", bias, (weight.shape[0],))
    return reason


def _other(x: torch.Tensor, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> str | None:
    """Return why torch's convolution may refuse a parameter beside this input, or None."""
    if (reason := not_plain(tensor)) is not None:
        return reason
    if tuple(tensor.shape) != shape:
        return f"the {name} has shape {tuple(tensor.shape)} instead of {shape}"
    if tensor.device != x.device:
        return f"the {name} is on {tensor.device}, the input on {x.device}"
    if tensor.dtype is x.dtype:
        return None
    if torch.is_autocast_enabled(x.device.type) and {tensor.dtype, x.dtype} <= DTYPES:
        return None
    return f"the {name} has dtype {tensor.dtype}, the input {x.dtype}"

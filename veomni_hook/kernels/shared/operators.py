"""Custom torch operators for kernels, known to fake tensors, tracers and `torch.library.opcheck`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import compiler as _compiler
from torch.compiler import is_dynamo_compiling

from veomni_hook import accelerator

__all__ = ["define_op", "on_its_device", "watched"]

_modes = torch._C._len_torch_dispatch_stack
# Without the check of `torch.cuda.current_device` that CUDA is initialised: a tensor is there.
# Builds without CUDA have no such function.
_current_cuda_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

# `define` and `impl` cost less per call than the decorators of `torch.library.custom_op`.
_LIBRARY: Any = torch.library.Library("veomni_hook", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_op(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``torch.ops.veomni_hook.<name>`` without a gradient, and return a function that calls it.

    If nothing observes operators (fake tensors, selective checkpointing, a dispatch profiler), the function
    calls the implementation directly, which saves the host the dispatcher's overhead.

    Args:
        schema: name, parameters and results, in the form of `torch.library.Library.define`.
        implementation: called with the device of its first operand, a tensor, as the current device, on which
            Triton launches; it must not mutate its input or return an alias of it.
        fake: returns results of the same shapes and dtypes, from tensors without data.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    launch = on_its_device(implementation)
    _LIBRARY.impl(name, launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"veomni_hook::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.veomni_hook, name).default

    def call(*operands: Any) -> Any:
        return operator(*operands) if watched() else launch(*operands)

    return call


def on_its_device(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``implementation``, called with the device of its first operand as the current device."""

    # A model spread over several devices runs all of them from one current device.
    @wraps(implementation)
    def launch(x: torch.Tensor, *operands: Any) -> Any:
        # Numbers instead of `torch.device`: this is asked at every launch.
        if x.is_cpu or (x.is_cuda and x.get_device() == _current_cuda_device()):
            return implementation(x, *operands)
        device = x.device
        there = accelerator.module(device)
        if there is None or device.index == there.current_device():
            return implementation(x, *operands)
        with there.device(device.index):
            return implementation(x, *operands)

    return launch


def watched() -> bool:
    """Return whether a call must use the dispatcher, so that operators behave as their schema says."""
    # Dynamo knows the first function; tracers that run the code set the flag.
    return is_dynamo_compiling() or _compiler._is_compiling_flag or _modes() > 0

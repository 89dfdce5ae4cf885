"""Checkpointed layers: which models have them, and what a layer keeps for its recomputation.

Upstream's models call a function of their own choice for each layer (`gradient_checkpointing`). With the
setting ``memory``, this function is `run`, whoever has enabled it: torch's non-reentrant checkpoint, whose
inputs and results of attention (`attention`) are kept by a `Kept`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import local
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.memory import parts
from veomni_hook.memory.offload import Kept, Layer

__all__ = ["chosen", "current", "entered", "run", "wanted"]


class _Running(local):
    """The layer that runs, or is run again, in this thread."""

    kept: Kept | None = None


_running = _Running()


def wanted(model: Any) -> bool:
    """Return whether upstream enables checkpoints in ``model``, which was just made.

    Mutates: ``model.config``, if the setting asks for them: upstream removes this field then.
    """
    if not model.supports_gradient_checkpointing:
        return False
    asked = parts.in_force()
    if asked.checkpoint and asked.budget is None:
        model.config.gradient_checkpointing = True
    return bool(getattr(model.config, "gradient_checkpointing", False))


def chosen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that calls a model's layers: `run` with the setting, else ``function``.

    Options of torch's checkpoint stay. What is not torch's checkpoint, or has a ``context_fn``, which chooses
    tensors, stays as it is, and a warning says so.
    """
    asked = parts.in_force()
    if not asked.checkpoint and asked.budget is None:
        return function
    options = dict(getattr(function, "keywords", {}))
    options.pop("use_reentrant", None)
    if getattr(function, "func", function) in (checkpoint, run) and "context_fn" not in options:
        return partial(run, **options) if options else run
    warnings.warn(
        "VEOMNI_MEMORY: the script has its own checkpoints (offload=True, a context_fn, another function), "
        "which stay: attention runs again in them, and what they keep is not moved. Enable plain ones "
        "instead; VEOMNI_MEMORY=offload moves what those keep",
        VeomniHookWarning,
        stacklevel=2,
    )
    return function


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[None, None]:
        return None, None


def entered(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward hook in place of upstream's, which lets frozen embeddings require gradients.

    Upstream makes them a leaf, which a graph keeps on the device until its backward ends. Here they come from
    a function whose gradient nobody gets; ``retain_grad`` keeps theirs.
    """

    def enter(module: Any, operands: Any, y: Any) -> Any:
        frozen = type(y) is torch.Tensor and not y.requires_grad and torch.is_grad_enabled()
        if not frozen or not parts.in_force().checkpoint or is_dynamo_compiling():
            return hook(module, operands, y)
        return _Entered.apply(y.new_empty(0, requires_grad=True), y)  # type: ignore[no-untyped-call]

    return enter


def current() -> Kept | None:
    """Return what keeps tensors for the layer that runs in this thread, or None."""
    return _running.kept


def run(function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Return ``function(*inputs)`` of a layer, which its backward computes again.

    Inputs, and results of attention, go to the host in between if the setting says ``offload``.
    """
    kept: Kept
    hooks: Any
    asked = parts.in_force()
    if not asked.offload or is_dynamo_compiling() or not torch.is_grad_enabled():
        kept, hooks = Kept(), nullcontext()
    else:
        kept = Layer(asked.host_bytes)
        hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack)
    with hooks:
        call = partial(_within, kept, asked, function)
        return checkpoint(call, *inputs, use_reentrant=False, **named)


def _within(kept: Kept, asked: parts.Parts, function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    outer, _running.kept = _running.kept, kept
    try:
        if parts.in_force() is asked:
            return function(*inputs, **named)
        with parts.using(asked):  # chosen between a forward and its backward
            return function(*inputs, **named)
    finally:
        _running.kept = outer

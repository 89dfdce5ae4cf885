"""Budgets of memory: the fastest parts of the setting ``memory`` that keep one, chosen when a model trains.

A call of a model in training is predicted (`prediction`) with its batch, the script's optimizer and the
gradients that are there, before it runs: as it is, and then with each step of `parts.LADDER` until one fits.
Later calls are predicted again if a tensor of the batch is larger than any before, or gradients stay.
Parts are added, never taken back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import local
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.optim import AdamW, Optimizer

from veomni_hook import accelerator
from veomni_hook.errors import OffloadError, PredictionError, VeomniHookWarning
from veomni_hook.kernels.shared.changed import changed
from veomni_hook.memory import parts
from veomni_hook.memory.host import free_bytes
from veomni_hook.memory.lengths import shape_of
from veomni_hook.memory.prediction import arguments_of, optimizer_of, predict
from veomni_hook.memory.remedies import checkpoint_layers, layers_of, with_setting
from veomni_hook.sizes import readable

__all__ = ["SHARE", "chosen_for", "keep"]

#: Of a device's memory: the rest is for its context, fragments of the allocator, and what is not predicted.
SHARE = 0.95


@dataclass
class _Calls:
    """What is known of the calls of a model.

    Attributes:
        sizes: of the largest tensors, by the names of arguments.
        gradients: whether there were some before a forward.
        sentence: what was chosen, and why.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    gradients: bool = False
    sentence: str = ""

    def exceed(self, model: nn.Module, batch: Mapping[str, Any]) -> bool:
        """Note a call; return whether it may take more memory than those before."""
        before = dict(self.sizes), self.gradients
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                self.sizes[name] = max(self.sizes.get(name, 0), value.numel())
        self.gradients = self.gradients or any(weight.grad is not None for weight in model.parameters())
        return before != (self.sizes, self.gradients)


class _Running(local):
    """Whether a call is predicted in this thread."""

    prediction: bool = False


_running = _Running()
_CALLS: WeakKeyDictionary[nn.Module, _Calls] = WeakKeyDictionary()
#: Models inside of those that were called.
_INNER: WeakSet[nn.Module] = WeakSet()


def keep(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Choose parts for a call of ``model``, if the setting is a budget and this call is to be predicted.

    Mutates: the parts in force, and which function calls the layers of ``model``.

    Args:
        model: a model of transformers, which is about to run.
        args: its operands.
        kwargs: its operands by name.
    """
    budget = parts.in_force().budget
    if budget is None or is_dynamo_compiling() or not torch.is_grad_enabled() or not model.training:
        return
    if _running.prediction or model in _INNER:
        return
    batch = arguments_of(model, args, kwargs)
    calls = _CALLS.setdefault(model, _Calls())
    if not calls.exceed(model, batch):
        return
    _INNER.update(inner for inner in model.modules() if inner is not model and hasattr(inner, "config"))
    try:
        with changed(vars(_running), {"prediction": True}):
            calls.sentence = _chosen(model, batch, budget)
    except PredictionError as error:
        _apply(model, parts.LADDER[-1])
        calls.sentence = f"all parts are on, because {error.what}"
        warnings.warn(f"VEOMNI_MEMORY: {calls.sentence}", VeomniHookWarning, stacklevel=2)
    parts.say(f"memory: {calls.sentence}")


def chosen_for(model: nn.Module) -> str:
    """Return what was chosen for ``model`` or a model in it, and why; empty: nothing yet."""
    return next((_CALLS[inner].sentence for inner in model.modules() if inner in _CALLS), "")


def _chosen(model: nn.Module, batch: Mapping[str, Any], budget: int) -> str:
    """Put the first parts in force that keep the budget, or those that need the least; return a sentence."""
    if parts.is_shared():
        raise PredictionError("processes share this model's sequences or experts", where="", fix="")
    device = next(model.parameters()).device
    optimizer = optimizer_of(model)
    most = _capacity(model, batch, optimizer, device, budget)
    if not type(optimizer).__module__.startswith("torch.optim"):
        # Most of those that are not PyTorch's keep no more than AdamW does.
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = AdamW(trained) if trained else None
    peaks: dict[str, int] = {}
    for text, block in _candidates(model):
        try:
            with block:
                peaks[text] = predict(model, batch, optimizer=optimizer, device=device).peak
        except PredictionError as error:
            if isinstance(error.__cause__, OffloadError):
                continue  # no room on the host
            raise
        if peaks[text] <= most:
            break
    fitting = [text for text, peak in peaks.items() if peak <= most]
    text = fitting[0] if fitting else min(peaks, key=peaks.__getitem__)
    if text:
        _apply(model, text)
    rows, tokens = shape_of(batch)
    tried = ", ".join(
        f"{readable(peak)} with {text}" if text else f"{readable(peak)} as it is"
        for text, peak in peaks.items()
    )
    sentence = f"{type(model).__name__}, {rows} x {tokens:,} tokens, of {readable(most)}: {tried}"
    if not fitting:
        sentence += "; nothing fits"
        warnings.warn(
            f"VEOMNI_MEMORY: {sentence}: use shorter sequences, more GPUs, or adapters",
            VeomniHookWarning,
            stacklevel=3,
        )
    return sentence


def _candidates(model: nn.Module) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    yield "", nullcontext()
    for text in parts.LADDER[parts.step() :]:
        block = with_setting(text, model)
        if block is not None:
            yield text, block


def _apply(model: nn.Module, text: str) -> None:
    parts.choose(text)
    checkpoint_layers(layers_of(model))


def _capacity(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: Optimizer | None,
    device: torch.device,
    budget: int,
) -> int:
    """Return the bytes that a step may take, weights included: others of this process take their own."""
    home = accelerator.module(device)
    if home is None:
        return int(SHARE * (budget or free_bytes() + _bytes(model.parameters(), device)))
    states = [] if optimizer is None else [state.values() for state in optimizer.state.values()]
    own = [
        *model.parameters(),
        *model.buffers(),
        *(weight.grad for weight in model.parameters()),
        *batch.values(),
        *(value for values in states for value in values),
    ]
    others: int = max(0, home.memory_allocated(device) - _bytes(own, device))
    available = home.mem_get_info(device)[0] + home.memory_reserved(device)
    return int(SHARE * (budget or available)) - others


def _bytes(values: Iterable[Any], device: torch.device) -> int:
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.device == device)
    storages = {storage._cdata: storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
    return sum(storages.values())

"""How much memory a training step takes, by part, before it runs: its own code, on tensors without data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach

from veomni_hook.memory.fakes import fakes, on, swapped
from veomni_hook.memory.tracker import Tracker, parts_of

__all__ = ["Prediction", "predict", "step_of"]

WEIGHTS, BUFFERS, GRADIENTS, OPTIMIZER, INPUTS = "weights", "buffers", "gradients", "optimizer", "inputs"


@dataclass(frozen=True)
class Prediction:
    """The memory of a step, in bytes.

    Attributes:
        peak: the most that lives at once.
        parts: what lives then, by part: weights, gradients, optimizer's states, and activations by the part
            of the model that allocated them.
    """

    peak: int
    parts: Mapping[str, int]


def predict(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | None = None,
) -> Prediction:
    """Return what a training step of ``model`` takes: forward, backward of its loss, the optimizer's step.

    Nothing is computed, and ``model``, its gradients and ``optimizer`` stay as they are. The step is a later
    one: the optimizer has its states, gradients are None.

    Args:
        model: its output has a loss; what it runs in training mode is predicted.
        inputs: the keyword arguments of its forward. Tensors may be on any device.
        optimizer: one of PyTorch's, or one that is made as these; None: the step ends with the gradients.
        device: where the step will run; by default where the model is.
    """
    device = device or next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), _training(model), fakes(), swapped(model, device) as stand_ins:
        twin = None if optimizer is None else _twin(optimizer, stand_ins)
        return step_of(model, on(device, dict(inputs)), twin)


def step_of(
    model: nn.Module, inputs: Mapping[str, Any], optimizer: torch.optim.Optimizer | None
) -> Prediction:
    """Run a step of ``model`` as it is, and return the memory that it took; gradients are None before it."""
    weights = list(model.parameters())
    tracker = Tracker(weights[0].device.type, parts_of(model))
    tracker.label(weights, WEIGHTS)
    tracker.label(model.buffers(), BUFFERS)
    tracker.label((leaf for leaf in inputs.values() if isinstance(leaf, torch.Tensor)), INPUTS)
    if optimizer is not None:
        _fill(optimizer, tracker)
    noted = [
        weight.register_post_accumulate_grad_hook(lambda one: tracker.label([one.grad], GRADIENTS))
        for weight in weights
        if weight.requires_grad
    ]
    tracker.begin()
    try:
        with tracker:
            model(**inputs).loss.backward()
            if optimizer is not None:
                with tracker.labelled(OPTIMIZER):
                    optimizer.step()
    finally:
        for handle in noted:
            handle.remove()
        for weight in weights:
            weight.grad = None
    return Prediction(tracker.peak, dict(sorted(tracker.at_peak.items(), key=lambda row: -row[1])))


def _fill(optimizer: torch.optim.Optimizer, tracker: Tracker) -> None:
    """Let the optimizer make its states, by a step whose gradients are zero."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for weight in weights:
        weight.grad = None
    for state in optimizer.state.values():
        tracker.label((leaf for leaf in state.values() if isinstance(leaf, torch.Tensor)), OPTIMIZER)


def _twin(optimizer: torch.optim.Optimizer, stand_ins: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer like ``optimizer`` for the stand-ins of its weights."""
    groups = []
    for group in optimizer.param_groups:
        weights = group["params"]
        ours = {**group, "params": [stand_ins[id(weight)] for weight in weights]}
        if group.get("foreach", False) is None and not group.get("fused"):
            # What it decides by the class of its weights.
            ours["foreach"] = _default_to_fused_or_foreach(weights, differentiable=False)[1]
        groups.append(ours)
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    accepted = inspect.signature(kind).parameters
    return kind(groups, **{name: value for name, value in optimizer.defaults.items() if name in accepted})


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Let ``model`` be in training mode in the block; one that is keeps the modes of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

"""How much memory a training step takes, by part, before it runs: its own code, on tensors without data."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach

from veomni_hook.accelerator import is_rocm
from veomni_hook.errors import PredictionError
from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.slot.guards import module_of, slots_in
from veomni_hook.memory.fakes import fakes, on, swapped
from veomni_hook.memory.tracker import Tracker, parts_of

__all__ = ["Prediction", "arguments_of", "optimizer_of", "predict", "step_of"]

WEIGHTS, BUFFERS, GRADIENTS, OPTIMIZER, INPUTS = "weights", "buffers", "gradients", "optimizer", "inputs"
WORKSPACES = "workspaces of cuBLAS"
# PyTorch's defaults, for each thread that multiplies.
_ON_HOPPER, _ELSEWHERE, _HOPPER = 32 << 20, 8320 << 10, 9


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
    one: the optimizer has its states, and gradients are None where the model has none.

    Raises:
        PredictionError: the step cannot run without data, or the weights are distributed or quantised.

    Args:
        model: its output has a loss; what it runs in training mode is predicted.
        inputs: the keyword arguments of its forward. Tensors may be on any device.
        optimizer: one of PyTorch's, or one that is made as these; None: the step ends with the gradients.
        device: where the step will run; by default where the model is.
    """
    name = type(model).__name__
    if unfit := next((type(one).__name__ for one in model.parameters() if not_plain(one)), None):
        raise PredictionError(
            f"the memory of a model whose weights are {unfit}s cannot be predicted",
            where=name,
            fix="predict before the weights are distributed or quantised",
        )
    for slot in _slots_of(model):
        slot.prepare()  # a first call may do so too late for itself
    accumulating = [weight for weight in model.parameters() if weight.grad is not None]
    device = device or next(model.parameters()).device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PredictionError(
            "backward passes on fake tensors of a GPU need one, and this machine has none",
            where=name,
            fix="predict on a machine with a GPU, or for the CPU",
        )
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(_uncounted(model))
        stack.enter_context(_training(model))
        try:
            stack.enter_context(fakes())
            stand_ins = stack.enter_context(swapped(model, device))
            twin = None if optimizer is None else _twin(optimizer, stand_ins)
            for weight in accumulating:
                stand_ins[id(weight)].grad = torch.empty_like(stand_ins[id(weight)])
            found = step_of(model, on(device, dict(inputs)), twin)
        except PredictionError:
            raise
        except Exception as error:
            raise PredictionError(
                f"a step on tensors without data raised {type(error).__name__}: {error}",
                where=name,
                fix="check that the inputs have labels, and that model(**inputs).loss.backward() runs",
            ) from error
    reserved = _workspaces(device)
    parts = {**found.parts, **({WORKSPACES: reserved} if reserved else {})}
    return Prediction(found.peak + reserved, parts)


def arguments_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operands of a call of ``model`` by name."""
    arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    return {**arguments, **arguments.pop("kwargs", {})}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer | None:
    """Return the optimizer that trains the most weights, all of ``model``; None: this process has none."""
    own = {id(weight) for weight in model.parameters()}
    gc.collect()  # optimizers that nobody has any more
    numbers: dict[torch.optim.Optimizer, int] = {}
    for candidate in gc.get_objects():
        # By type: asking some objects for their class runs their code. Wrappers have no groups of their own.
        if issubclass(type(candidate), torch.optim.Optimizer) and "param_groups" in vars(candidate):
            weights = [id(weight) for group in candidate.param_groups for weight in group["params"]]
            if weights and own.issuperset(weights):
                numbers[candidate] = len(weights)
    return max(numbers, key=numbers.__getitem__, default=None)


def step_of(
    model: nn.Module, inputs: Mapping[str, Any], optimizer: torch.optim.Optimizer | None
) -> Prediction:
    """Run a step of ``model`` as it is, and return the memory that it took.

    Mutates: no weight has a gradient afterwards.
    """
    weights = list(model.parameters())
    tracker = Tracker(weights[0].device.type, parts_of(model), step_of.__code__)
    tracker.label(weights, WEIGHTS)
    tracker.label(model.buffers(), BUFFERS)
    tracker.label((weight.grad for weight in weights), GRADIENTS)
    tracker.label(inputs.values(), INPUTS)
    if optimizer is not None:
        _fill(optimizer, tracker)
    noted = [
        weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda one: tracker.label([one.grad], GRADIENTS)
        )
        for weight in weights
        if weight.requires_grad
    ]
    tracker.begin()
    try:
        with tracker:
            loss = getattr(model(**inputs), "loss", None)
            if loss is None:
                raise PredictionError(
                    "the model returns no loss", where=type(model).__name__, fix="give it labels"
                )
            loss.backward()
            if optimizer is not None:
                with tracker.labelled(OPTIMIZER):
                    optimizer.step()
    finally:
        for handle in noted:
            handle.remove()
        for weight in weights:
            weight.grad = None
    return Prediction(tracker.peak, {part: size for part, size in tracker.at_peak.items() if size})


def _fill(optimizer: torch.optim.Optimizer, tracker: Tracker) -> None:
    """Let the optimizer make its states, by a step whose gradients are zero."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for weight, grad in zip(weights, before, strict=True):
        weight.grad = grad
    for state in optimizer.state.values():
        tracker.label(state.values(), OPTIMIZER)


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


def _workspaces(device: torch.device) -> int:
    """Return the bytes that cuBLAS keeps for the thread of the forward and for that of the backward."""
    if device.type != "cuda" or is_rocm():
        return 0
    return 2 * (_ON_HOPPER if torch.cuda.get_device_capability(device)[0] == _HOPPER else _ELSEWHERE)


def _slots_of(model: nn.Module) -> list[Slot]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    homes = {home for kind in kinds if (home := module_of(kind)) is not None}
    return [slot for home in homes for slot in slots_in(home).values()]


@contextmanager
def _uncounted(model: nn.Module) -> Iterator[None]:
    """Do not count the calls of kernels in the block as calls of ``model``."""
    slots = _slots_of(model)
    before = [dict(slot.records) for slot in slots]
    for slot in slots:
        slot.records.clear()
    try:
        yield
    finally:
        for slot, records in zip(slots, before, strict=True):
            slot.records.clear()
            slot.records.update(records)


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

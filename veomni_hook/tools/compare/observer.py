"""Connects a recorder to a training script, at places that kernels' guards do not check.

Guards refuse a kernel if a module has hooks or a replaced `forward` or `__call__`, so none of these is
changed. The observer uses `torch.autograd.backward`, which every loss goes through, torch's global hook for
optimizer steps, and `PreTrainedModel._call_impl`, which torch calls inside `__call__`.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_post_hook

from veomni_hook.tools.compare.plan import ATTACHED, RESULT, Plan
from veomni_hook.tools.compare.recorder import Recorder, rank_and_world

__all__ = ["Observation", "Stopped", "attach"]

Function: TypeAlias = Callable[..., object]

# How long a finished rank waits for the others: the first one to end may stop the store that all use.
WAIT = 20.0


class Stopped(SystemExit):
    """Ends the script after its last step like `sys.exit(0)`, with `finally` and `atexit`."""

    def __init__(self) -> None:
        super().__init__(0)


def attach(plan: Plan) -> None:
    """Record this process, and stop it after the steps of the plan."""
    with open(os.path.join(plan.folder, f"{ATTACHED}{os.getpid()}"), "w", encoding="ascii"):
        pass
    observation = Observation(Recorder(plan), stop=_stop)
    observation.begin()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=observation.recorder.reset)


class Observation:
    """A recorder, and what was changed in torch and transformers for it.

    Args:
        recorder: receives the events.
        stop: called after the step that follows the last one of the plan, and at every later step.
    """

    def __init__(self, recorder: Recorder, stop: Callable[[Recorder], None]) -> None:
        self.recorder = recorder
        self._stop = stop
        self._undo: list[Callable[[], None]] = []
        self._seen_process = 0

    def begin(self) -> None:
        """Start observing."""
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.optim.Optimizer, "__init__", self._optimizer_made)
        self._replace(torch.amp.GradScaler, "__init__", self._scaler_made)
        self._replace(torch.amp.GradScaler, "step", self._scaler_step)
        self._undo.append(register_optimizer_step_post_hook(self._stepped).remove)

    def end(self) -> None:
        """Undo all changes."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, around: Function) -> None:
        """Let ``around`` be called instead of a function, with the function before its arguments."""
        original, own = getattr(owner, name), name in vars(owner)

        @functools.wraps(original)
        def replacement(*args: object, **kwargs: object) -> object:
            return around(original, *args, **kwargs)

        setattr(owner, name, replacement)
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def _backward(self, original: Function, *args: object, **kwargs: object) -> object:
        recorder = self.recorder
        # A call inside a call comes from a reentrant checkpoint.
        if torch.compiler.is_compiling() or recorder.depth:
            return original(*args, **kwargs)
        self._note_models()
        self._note_process()
        recorder.note_backward(_scalars(*args, **kwargs))
        recorder.depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            recorder.depth -= 1

    def _optimizer_made(self, original: Function, *args: object, **kwargs: object) -> None:
        # By now the model usually exists and has not been called yet.
        self._note_models()
        original(*args, **kwargs)

    def _scaler_made(self, original: Function, scaler: object, *args: object, **kwargs: object) -> None:
        for kind in type(scaler).__mro__:
            if "scale" in vars(kind) and not hasattr(vars(kind)["scale"], "__wrapped__"):
                self._replace(kind, "scale", _scale)
        original(scaler, *args, **kwargs)

    def _scaler_step(self, original: Function, *args: object, **kwargs: object) -> object:
        before = self.recorder.marks
        result = original(*args, **kwargs)
        if self.recorder.marks == before:
            self.recorder.note_skipped()
        return result

    def _stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._note_process()
        recorder = self.recorder
        if recorder.note_step(optimizer) >= recorder.plan.steps and recorder.profiled():
            self._stop(self.recorder)

    def _note_models(self) -> None:
        """Observe the calls of transformers' models as soon as their base class exists."""
        kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        if kind is None or hasattr(vars(kind).get("_call_impl"), "__wrapped__"):
            return
        # torch.compile begins at the first frame that it does not skip: that has to be the model's forward
        # still. (Making an optimizer imports torch._dynamo in any case.)
        dynamo = importlib.import_module("torch._dynamo")
        note = dynamo.disable(self.recorder.note_call)
        self._replace(kind, "_call_impl", functools.partial(_observed_call, self.recorder, note))
        for function in (vars(kind)["_call_impl"], _observed_call):
            dynamo.decorators.skip_code(function.__code__)

    def _note_process(self) -> None:
        """Make sure that a training process writes its record, however it ends."""
        if self._seen_process == os.getpid():
            return
        self._seen_process = os.getpid()
        write = functools.partial(self.recorder.write, stopped=False)
        atexit.register(write)
        children = sys.modules.get("multiprocessing")
        if children is not None and children.parent_process() is not None:
            from multiprocessing.util import Finalize  # such a child calls no atexit handlers

            Finalize(None, write, exitpriority=100)


def _observed_call(
    recorder: Recorder, note: Function, original: Function, model: object, *args: object, **kwargs: object
) -> object:
    calling = recorder.calling
    if (
        torch.compiler.is_compiling()
        or recorder.depth
        or getattr(calling, "inside", False)
        or not torch.is_grad_enabled()
    ):
        return original(model, *args, **kwargs)
    note(model, args, kwargs)
    calling.inside = True
    try:
        return original(model, *args, **kwargs)
    finally:
        calling.inside = False


def _scale(original: Function, scaler: object, outputs: object) -> object:
    scaled = original(scaler, outputs)
    if isinstance(scaled, torch.Tensor) and scaled is not outputs:
        scaled._veomni_compare_unscaled = outputs.detach()  # type: ignore[attr-defined]
    return scaled


def _scalars(tensors: Any, grad_tensors: object = None, *_: object, **__: object) -> list[torch.Tensor]:
    """Return the losses that backward was called on: scalars without a gradient argument."""
    if grad_tensors is not None:
        return []
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not all(isinstance(root, torch.Tensor) and root.numel() == 1 for root in roots):
        return []
    return [getattr(root, "_veomni_compare_unscaled", root) for root in roots]


def _stop(recorder: Recorder) -> None:
    """Write the record, wait for the other ranks, and end the script.

    Raises:
        Stopped: always; again at every later step if the script catches it.
    """
    if recorder.write(stopped=True):
        _wait_for_ranks(recorder.plan.folder)
        atexit.register(_leave_group)  # the last one registered is called first
    raise Stopped


def _wait_for_ranks(folder: str) -> None:
    _, world = rank_and_world()
    here = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    limit = time.monotonic() + WAIT
    while time.monotonic() < limit:
        written = [name for name in os.listdir(folder) if name.startswith(RESULT) and name.endswith(".json")]
        if len(written) >= here:
            return
        time.sleep(0.05)


def _leave_group() -> None:
    """Leave the process group, because the script no longer can; otherwise NCCL warns."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()

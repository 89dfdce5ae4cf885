"""Records what a training process does, and writes it to a file.

Values stay on the device until the end: losses are kept as tensors, times as events in the device's queue. So
recording does not synchronise, and does not change how host and device overlap.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from veomni_hook.tools.compare.measures import Moment, device_name, is_capturing, peak_memory, seconds_of
from veomni_hook.tools.compare.plan import PROGRESS, RESULT, Plan, write_whole
from veomni_hook.tools.compare.profile import StepProfile
from veomni_hook.tools.facts import Facts

__all__ = ["Mark", "Recorder", "Track", "tokens_of"]


@dataclass(frozen=True)
class Mark:
    """An optimizer step that has just ended: its time, and what was recorded until then.

    Attributes:
        moment: when it ended.
        losses: which of the recorded losses belong to it, from the first to before the second.
        tokens: those since the process started; None: unknown for a call.
        backwards: the calls of backward.
    """

    moment: Moment
    losses: tuple[int, int]
    tokens: int | None
    backwards: int


@dataclass
class Track:
    """The steps of one optimizer; ``begin`` is the first of the recorded losses that the next one has."""

    name: str
    marks: list[Mark] = field(default_factory=list)
    begin: int = 0


class Recorder:
    """Records backward calls, model calls and optimizer steps of this process.

    Attributes:
        plan: where to write, and when to stop.
        depth: how many calls of backward are running; nothing inside them is recorded.
        calling: per thread, whether a model's call is running.
        skipped: optimizer steps that a gradient scaler skipped.
        notes: what could not be measured, and why.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a process that was forked: what was recorded is its parent's."""
        self.depth = 0
        self.calling = threading.local()
        self.skipped = 0
        self.notes: list[str] = []
        self._process = os.getpid()
        self._losses: list[torch.Tensor] = []
        self._backwards = 0
        self._tokens: int | None = 0
        self._models: WeakSet[nn.Module] = WeakSet()
        self._tracks: WeakKeyDictionary[Optimizer, Track] = WeakKeyDictionary()
        self._ended: list[Track] = []  # in the order of their first steps; kept after the optimizers are gone
        self._device = ""
        self._low_precision = ""
        self._first_call: Moment | None = None
        self._progress: int | None = None
        self._written = False
        #: What is known after the last step, while one more is profiled.
        self._found_before: Facts | None = None
        self._profile: StepProfile | None = None
        self._profiled_from = 0

    @property
    def marks(self) -> int:
        """The number of counted steps of all optimizers."""
        return sum(len(track.marks) for track in self._ended)

    def note_backward(self, losses: Sequence[torch.Tensor]) -> None:
        """Record a call of backward; ``losses`` are the scalars that it was called on, if any."""
        self._backwards += 1
        if not losses or self._written:
            return
        values = [(loss.to_local() if hasattr(loss, "to_local") else loss).detach() for loss in losses]
        # A copy: torch.compile with CUDA graphs writes the next loss into the same memory.
        self._losses.append(values[0].clone() if len(values) == 1 else sum(values[1:], values[0]))
        if not self._device:
            self._device = values[0].device.type

    def note_call(self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Record an outermost call of a model, with gradients."""
        count = tokens_of(model, args, kwargs)
        self._tokens = None if count is None or self._tokens is None else self._tokens + count
        self._models.add(model)
        if self._first_call is None:
            parameter = next(iter(model.parameters()), None)
            if parameter is not None:
                self._device = self._device or parameter.device.type
                self._first_call = Moment(self._device)
                autocast = torch.is_autocast_enabled(self._device)
                dtype = torch.get_autocast_dtype(self._device) if autocast else parameter.dtype
                self._low_precision = str(dtype).removeprefix("torch.")

    def note_step(self, optimizer: Optimizer) -> int:
        """Record a step of an optimizer; return how many of its steps count.

        A step counts if backward was called since the previous one, or has never been called: optimizers that
        update group by group call ``step`` several times.
        """
        track = self._tracks.get(optimizer)
        if track is None:
            track = self._tracks.setdefault(optimizer, Track(type(optimizer).__name__))
            # An optimizer that starts later, in a second training phase.
            track.begin = max((ended.begin for ended in self._ended), default=0)
        again = self._backwards and track.marks and track.marks[-1].backwards == self._backwards
        if again or self._written or self._found_before is not None:
            return len(track.marks)
        groups = (group["params"] for group in optimizer.param_groups)
        first = next((parameter for parameters in groups for parameter in parameters), None)
        device = self._device or ("cpu" if first is None else first.device.type)
        if is_capturing(device):
            return len(track.marks)
        if not track.marks:
            self._ended.append(track)
            if first is not None and not self._low_precision:
                self._low_precision = str(first.dtype).removeprefix("torch.")
        self._device = device
        span = (track.begin, len(self._losses))
        track.marks.append(Mark(Moment(device), span, self._tokens, self._backwards))
        track.begin = len(self._losses)
        if len(track.marks) == max(len(ended.marks) for ended in self._ended):
            if self._progress is None:
                path = os.path.join(self.plan.folder, f"{PROGRESS}{os.getpid()}")
                self._progress = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(self._progress, b".")
        return len(track.marks)

    def note_skipped(self) -> None:
        """Record that a gradient scaler skipped a step: its losses belong to no step."""
        self.skipped += 1
        for track in self._ended:
            track.begin = len(self._losses)

    def profiled(self) -> bool:
        """Profile the step after the last one that counts; return whether this is done.

        Waits for the device. Rank 0 alone profiles; the others make the step, too.
        """
        if self._found_before is None:
            self._found_before = self._found()
            self._profiled_from = self._backwards
            if self._found_before["rank"] == 0:
                self._profile = StepProfile(self._found_before["device"])
            return False
        if self._backwards == self._profiled_from:
            return False  # another optimizer of the last step
        if self._profile is not None:
            self._found_before["profile"], self._profile = self._profile.end(), None
        return True

    def write(self, *, stopped: bool) -> bool:
        """Write the record once; return whether this call did so. Waits for the device."""
        if self._written or self._process != os.getpid() or not (self._backwards or self._ended):
            return False
        self._written = True
        if self._profile is not None:
            self._profile.end()  # the script made no further step
        if self._progress is not None:
            os.close(self._progress)
        record = {"stopped": stopped, **(self._found_before or self._found())}
        path = os.path.join(self.plan.folder, f"{RESULT}{record['rank']}-{os.getpid()}.json")
        write_whole(path, record)
        return True

    def _found(self) -> Facts:
        rank, world = rank_and_world()
        track = max(self._ended, key=lambda candidate: len(candidate.marks), default=None)
        device = self._device or "cpu"
        found: Facts = {
            "rank": rank,
            "world": world,
            "pid": os.getpid(),
            "device": device,
            "backwards": self._backwards,
            "skipped": self.skipped,
            "optimizer": track.name if track is not None else None,
            "optimizers": len(self._ended),
            "precision": _precision(self._low_precision),
            "times": [],
            "first_call": None,
            "losses": [],
            "tokens": [],
            "notes": self.notes,
            "kernels": [],
            "explained": [],
            "profile": None,
            "models": [],
            "model_called": self._first_call is not None,
        }
        # Memory first, because the code below uses memory, too.
        found["memory"], found["peak"] = peak_memory(device)
        try:
            found["device_name"] = device_name(device)
            if track is not None:
                self._add_steps(found, track, device)
        except RuntimeError as error:  # the device failed: the script's own error says more
            self.notes.append(f"the recorded values could not be read from the device: {error}")
        if rank == 0:
            self._add_kernels(found)
        return found

    def _add_steps(self, found: Facts, track: Track, device: str) -> None:
        moments = [mark.moment for mark in track.marks]
        first = self._first_call
        before = seconds_of([*moments, *([first] if first is not None else [])], Moment(device), device)
        now = time.time()
        since_start = [now - seconds - self.plan.started for seconds in before]
        found["times"] = since_start[: len(moments)]
        found["first_call"] = since_start[-1] if first is not None else None
        values = [float(loss) for loss in self._losses]
        parts = [values[slice(*mark.losses)] for mark in track.marks]
        found["losses"] = [sum(part) if part else None for part in parts]
        known = [0, *(mark.tokens for mark in track.marks)]
        found["tokens"] = [
            None if earlier is None or later is None else later - earlier
            for earlier, later in pairwise(known)
        ]

    def _add_kernels(self, found: Facts) -> None:
        # Only now, after the last step: they load kernels.
        from veomni_hook.finders.state import STATE
        from veomni_hook.kernels.explain.summary import summary
        from veomni_hook.tools.compare.kernels import kernels_of
        from veomni_hook.tools.report.explanation import explain

        found["models"] = sorted({type(model).__name__ for model in self._models})
        if STATE.handles and os.environ.get("VEOMNI_HOOK") != "0":
            found["kernels"] = [row for model in self._models for row in kernels_of(model)]
            patched = (rows for model in self._models if (rows := explain(model).rows))
            found["explained"] = [summary(rows) for rows in patched]


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the world size, from torch.distributed or the launcher's variables."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _precision(seen: str) -> str:
    """Return the lowest known precision; accelerate enters autocast inside the model's forward."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared = getattr(state, "_shared_state", {}).get("_mixed_precision", "no")
    return {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}.get(str(shared), seen)


def tokens_of(model: object, args: Sequence[object], kwargs: Mapping[str, object]) -> int | None:
    """Return the number of tokens of a call, including padding, or None if no argument shows it.

    Counts ``input_ids`` (or the first positional argument if it holds integers ``[batch, length]``), else
    ``inputs_embeds``, else ``labels``. For an encoder-decoder, adds the decoder's tokens.
    """
    own = _count(kwargs, "input_ids", "inputs_embeds")
    if own is None and args:
        own = _ids(args[0])
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        other = _count(kwargs, "decoder_input_ids", "decoder_inputs_embeds", "labels")
        return other if own is None else own + (other or 0)
    if own is not None:
        return own
    return _ids(kwargs.get("labels"))


def _count(kwargs: Mapping[str, object], *names: str) -> int | None:
    for name in names:
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor):
            shape = value.shape[:-1] if name.endswith("inputs_embeds") else value.shape
            return int(shape.numel())
    return None


def _ids(value: object) -> int | None:
    """The size of a tensor of integers ``[batch, length]``; None for anything else."""
    if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
        return int(value.numel())
    return None

"""Predicts the memory of a script's first step, at the call of its model, and stops the script."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from veomni_hook.errors import VeomniHookError
from veomni_hook.tools.compare.observer import Observation, Stopped
from veomni_hook.tools.compare.plan import PLANNED, Plan, write_whole
from veomni_hook.tools.compare.recorder import Recorder, rank_and_world
from veomni_hook.tools.facts import Facts

__all__ = ["Planner"]


class Planner(Recorder):
    """Gets the calls of models, of which the first in training mode is planned and not run."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        # Nothing ends the script after its steps: none counts.
        self.observation = Observation(self, stop=lambda _: None)

    def note_call(self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Plan a call of ``model`` and end the script."""
        if not model.training:
            return
        self.observation.end()
        if rank_and_world()[0] == 0:
            path = os.path.join(self.plan.folder, PLANNED)
            write_whole(path, self._planned(model, args, kwargs))
        raise Stopped

    def note_backward(self, losses: Sequence[torch.Tensor]) -> None:
        """Wait for the next call."""

    def note_step(self, optimizer: Optimizer) -> int:
        """Count no step."""
        return 0

    def write(self, *, stopped: bool) -> bool:
        """Write nothing: there is no record of steps."""
        return False

    def _planned(self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Facts:
        from veomni_hook.memory import parts
        from veomni_hook.memory.prediction import arguments_of, optimizer_of
        from veomni_hook.tools.report.memory_plan import planned

        wanted = dict(self.plan.order or {})
        parts.tell(wanted.pop("setting"))
        batch = arguments_of(model, args, kwargs)
        try:
            plan = planned(model, batch, optimizer=optimizer_of(model), **wanted)
        except VeomniHookError as error:
            return {"what": error.what, "where": error.where, "fix": error.fix}
        return plan.to_dict()

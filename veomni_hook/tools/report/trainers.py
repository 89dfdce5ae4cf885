"""Notes of `explain` on models whose trainer computes log-probabilities from hidden states."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from veomni_hook.kernels.explain.rows import Row
from veomni_hook.kernels.explain.summary import NOTHING
from veomni_hook.kernels.shared.origin import written_in
from veomni_hook.layout import counted

if TYPE_CHECKING:
    from torch import nn

__all__ = ["beside_trainers", "notes_on_trainers"]

_HOME = "trl.trainer.utils"
#: What the patched form of that module imports.
_OURS = "veomni_log_probs"


def beside_trainers(rows: Iterable[Row], model: nn.Module) -> list[Row]:
    """Return rows of which those of the loss have nothing to wait for, if a trainer's head ran our kernel."""
    trainers = [trainer for trainer, calls in _heads(model) if calls.get(None)]
    return [
        replace(row, remedy=f"{NOTHING}: {trainers[0]}'s own head calls our kernel")
        if trainers and row.op == "linear_cross_entropy"
        else row
        for row in rows
    ]


def notes_on_trainers(model: nn.Module) -> Iterator[str]:
    """Yield a note for each module of ``model`` that has the fused head of a trainer."""
    for trainer, calls in _heads(model):
        said = [f"veomni_hook.token_log_probs in {counted(calls.get(None, 0), 'call')}"]
        for reason, number in calls.items():
            if reason is not None:
                said.append(f"its own function in {counted(number, 'call')}: {reason}")
        yield f"{trainer}'s log-probabilities: {'; '.join(said)}"
    for module in model.modules():
        forward: Any = module.__dict__.get("forward")
        if forward is not None and written_in(forward)[0] == _HOME and not hasattr(sys.modules[_HOME], _OURS):
            yield (
                f"TRL computes the log-probabilities of this model itself: {_HOME} was imported before the "
                "hook, or its form is not that of TRL 1.16"
            )


def _heads(model: nn.Module) -> Iterator[tuple[str, dict[str | None, int]]]:
    """Yield trainers whose fused head was called: how often ours ran (None), and theirs for each reason."""
    from veomni_hook.kernels.linear_cross_entropy import actor_head, trainer_head  # imports torch

    # verl's function gets no model: these are the calls of all models of the process.
    if written_in(type(model).forward)[0].startswith("verl.") and (calls := actor_head.told()):
        yield "verl", calls
    for module in model.modules():
        if calls := trainer_head.told(module):
            yield "TRL", calls

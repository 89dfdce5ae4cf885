"""Notes of `explain` on models whose trainer computes log-probabilities from hidden states."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from veomni_hook.kernels.shared.origin import written_in
from veomni_hook.layout import counted

if TYPE_CHECKING:
    from torch import nn

__all__ = ["notes_on_trainers"]

_HOME = "trl.trainer.utils"
#: What the patched form of that module imports.
_OURS = "veomni_log_probs"


def notes_on_trainers(model: nn.Module) -> Iterator[str]:
    """Yield a note for each module of ``model`` that has the fused head of TRL."""
    from veomni_hook.kernels.linear_cross_entropy import actor_head  # imports torch
    from veomni_hook.kernels.linear_cross_entropy.trainer_head import told

    if written_in(type(model).forward)[0].startswith("verl.") and (calls := actor_head.told()):
        # verl's function gets no model: these are the calls of all models of the process.
        yield _said("verl", calls)
    for module in model.modules():
        forward: Any = module.__dict__.get("forward")
        calls = told(module)
        if calls:
            yield _said("TRL", calls)
        elif (
            forward is not None and written_in(forward)[0] == _HOME and not hasattr(sys.modules[_HOME], _OURS)
        ):
            yield (
                f"TRL computes the log-probabilities of this model itself: {_HOME} was imported before the "
                "hook, or its form is not that of TRL 1.16"
            )


def _said(trainer: str, calls: dict[str | None, int]) -> str:
    ours = f"veomni_hook.token_log_probs in {counted(calls.get(None, 0), 'call')}"
    own = [
        f"its own function in {counted(number, 'call')}: {reason}"
        for reason, number in calls.items()
        if reason is not None
    ]
    return "; ".join([f"{trainer}'s log-probabilities: {ours}", *own])

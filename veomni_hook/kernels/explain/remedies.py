"""What lets a kernel compute what upstream's code computes at a place."""

from __future__ import annotations

from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import UNSUPPLIED
from veomni_hook.kernels.slot.candidates import Answers

__all__ = ["CHANGE", "NOTHING", "remedy_for"]

NOTHING = "nothing"
CHANGE = "change that, if you can, and its kernel runs"


def remedy_for(answers: Answers, reason: str, device: str) -> str:
    """Return what to do about ``reason``, for which upstream's code computes a call on ``device``.

    ``answers`` are those of the slot that gave the reason. A reason may say it itself, after a semicolon.
    """
    if not STATE.active:
        return "call veomni_hook.activate()"
    if answers.wanted == EAGER:
        return f"choose {AUTO} or a backend instead of {EAGER}"
    if "; " in reason and reason != UNSUPPLIED:
        return reason.split("; ")[1]
    selection = answers.selection(device)
    if selection.candidates and reason not in answers.as_fast:
        return CHANGE
    for kernel in () if selection.candidates else registry.kernels(selection.op, selection.variant):
        if kernel.automatic and (unmet := kernel.requires.unmet(selection.system)):
            return f"use a machine that has what its kernel needs ({kernel.backend} {unmet})"
    return NOTHING

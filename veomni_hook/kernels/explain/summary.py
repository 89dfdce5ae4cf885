"""What to do where upstream's code runs, and the sentence below the rows of an explanation that says it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from veomni_hook.kernels.explain.rows import MODES, NO_KERNEL, NOT_CALLED, Row
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import UNSUPPLIED
from veomni_hook.kernels.slot.candidates import REPLACED, Answers
from veomni_hook.layout import counted

__all__ = ["CHANGE", "NOTHING", "remedy_for", "summary"]

NOTHING = "nothing"
CHANGE = "change that, if you can, and its kernel runs"
_NOT_FUSED = (EAGER, NO_KERNEL, REPLACED, NOT_CALLED)


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


class _Place(NamedTuple):
    """What computes a place, in the mode that the sentence is about."""

    op: str
    fused: bool
    reason: str
    remedy: str


def summary(rows: Sequence[Row]) -> str:
    """Return the sentence about ``rows``: about training if there were calls in it, else about other calls.

    It gives the commonest of the reasons why places are not fused, and what to do about it.
    """
    mode = next((mode for mode in MODES if any(getattr(row, mode) for row in rows)), "")
    known = [row for row in rows if getattr(row, mode, ()) or row.settled or row.compiled]
    waiting = len(rows) - len(known)
    if uncalled := bool(waiting) and not mode and not any(row.compiled for row in rows):
        known, waiting = list(rows), 0
    places = [_place(row, mode) for row in known]
    told = f"in {mode}, " if mode else "before the first call: " if uncalled else ""
    told += _fused(places, "can run" if uncalled else "run")
    following = NOTHING
    if uncalled:
        broken = (row.remedy for row in rows if row.backend == NO_KERNEL)
        following = next(broken, "train a step, and explain the model again")
    if left := [place for place in places if not place.fused]:
        told += f"; not {_named(left, places)}" if len(left) < len(places) else ""
        if not uncalled:
            why = Counter((place.reason, place.remedy) for place in left)
            ((reason, following), number), *_ = why.most_common(1)
            told += f", {'mostly ' if number < len(left) else ''}because {reason}"
    if waiting:
        told += f"; {counted(waiting, 'place')} not called yet"
    return f"{told[0].upper()}{told[1:]}; next: {following}."


def _place(row: Row, mode: str) -> _Place:
    calls = getattr(row, mode, ())
    backend, reason = (calls[-1].backend, calls[-1].reason) if calls else (row.backend, row.reason)
    if backend == REPLACED or (row.compiled and not calls):
        reason = f"they are {reason}"
    changeable = backend in (REPLACED, NOT_CALLED) and not row.remedy.startswith(f"{NOTHING}:")
    remedy = CHANGE if changeable else row.remedy
    return _Place(row.op, backend not in _NOT_FUSED, reason.partition("; ")[0], remedy)


def _fused(places: Sequence[_Place], verb: str) -> str:
    """Return how many places are fused, with their ops."""
    fused = [place.op for place in places if place.fused]
    ops = f" ({', '.join(dict.fromkeys(fused))})" if fused else ""
    return f"{len(fused) or 'none'} of {counted(len(places), 'place')} {verb} fused kernels{ops}"


def _named(left: Sequence[_Place], places: Sequence[_Place]) -> str:
    """Return the ops of places that are not fused, with their number where others of the op are."""
    fused = {place.op for place in places if place.fused}
    counts = Counter(place.op for place in left)
    return ", ".join(f"{op} at {number}" if op in fused else op for op, number in counts.items())

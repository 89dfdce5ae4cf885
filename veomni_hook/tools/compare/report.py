"""The complete comparison as a dictionary of JSON-ready values, for printing, writing and drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, TypeAlias, TypedDict, cast

from veomni_hook.tools.compare.figures import loss_difference, side, times
from veomni_hook.tools.compare.runs import Run
from veomni_hook.tools.compare.verdict import problems_of, tolerance, verdict, why
from veomni_hook.tools.facts import Facts
from veomni_hook.tools.significance import FEW, Comparison

__all__ = ["Report", "report_of"]


NOT_SEEN = "Nothing can be compared: no optimizer step was seen in the runs of one kind."
#: By whether it fails without the hook, and with it.
FAILED = {
    (True, True): "The script fails without the hook and with it.",
    (True, False): "The script fails without the hook, and not with it.",
    (False, True): "The script fails with the hook, and not without it.",
}
UNKNOWN = dict.fromkeys(field.name for field in fields(Comparison))

Curve: TypeAlias = list[float | None]


class Loss(TypedDict):
    """The losses of both kinds compared, and those of runs without the hook: each a `LossDifference`."""

    verdict: str
    tolerance: float
    without_and_with: Facts
    two_without: Facts


#: All of a comparison; ``without`` and ``with`` are `figures.Side`, ``time`` is `significance.Comparison`,
#: ``kernels`` the rows of `kernels_of`, and ``runs`` what `Run.to_dict` returns.
Report = TypedDict(
    "Report",
    {
        "statement": str,
        "ok": bool,
        "command": list[str],
        "steps": int,
        "warmup": int,
        "device": str | None,
        "precision": str | None,
        "world": int | None,
        "optimizer": str | None,
        "models": list[str],
        "without": Facts,
        "with": Facts,
        "time": Facts,
        "loss": Loss,
        "curves": dict[str, Curve],
        "kernels": list[Facts],
        "why": list[str],
        "failed": list[str],
        "notes": list[str],
        "runs": list[Facts],
    },
)


def report_of(runs: Sequence[Run], command: Sequence[str], steps: int, warmup: int) -> Report:
    """Return the report of runs; ``ok`` is false if a run failed, no step was seen, or losses differ."""
    without = [run for run in runs if not run.hooked]
    hooked = [run for run in runs if run.hooked]
    sides = side(without, warmup), side(hooked, warmup)
    comparison = times(without, hooked, warmup)
    between, own = loss_difference(without, hooked), loss_difference(without)
    precision = str(_fact(runs, "precision") or "")
    limit = tolerance(precision)
    judged = verdict(comparison, sides, between, own, limit)
    failed = [run.label for run in runs if run.failed]
    seen = all(one.runs for one in sides)
    sentence = judged.sentence if seen else NOT_SEEN
    if failed:
        sentence = FAILED[any(run.failed for run in without), any(run.failed for run in hooked)]
    report: Report = {
        "statement": sentence,
        "ok": judged.ok and seen and not failed,
        "command": list(command),
        "steps": steps,
        "warmup": warmup,
        "device": _fact(runs, "device_name"),
        "precision": precision or None,
        "world": _fact(runs, "world"),
        "optimizer": _fact(runs, "optimizer"),
        "models": _fact(hooked, "models") or _fact(runs, "models") or [],
        "without": asdict(sides[0]),
        "with": asdict(sides[1]),
        "time": {**(asdict(comparison) if comparison else UNKNOWN), "verdict": judged.time},
        "loss": {
            "verdict": judged.loss,
            "tolerance": limit,
            "without_and_with": asdict(between),
            "two_without": asdict(own),
        },
        "curves": {"without": _mean_curve(without), "with": _mean_curve(hooked)},
        "kernels": _fact(hooked, "kernels") or [],
        "why": []
        if failed or comparison is None or comparison.verdict == FEW
        else why(runs, *sides, comparison.ratio),
        "failed": failed,
        "notes": problems_of(runs, steps),
        "runs": [run.to_dict() for run in runs],
    }
    return cast("Report", _finite(report))


def _fact(runs: Sequence[Run], name: str) -> Any:
    return next((run.facts[name] for run in runs if run.facts.get(name)), None)


def _mean_curve(runs: Sequence[Run]) -> Curve:
    """The mean loss of runs at each step that all of them have."""
    curves = [run.losses for run in runs if run.losses]
    mean: Curve = []
    for values in zip(*curves, strict=False):
        known = [value for value in values if value is not None]
        mean.append(sum(known) / len(known) if known and len(known) == len(values) else None)
    return mean


def _finite(value: object) -> object:
    """Return the value with None instead of infinity and nan, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

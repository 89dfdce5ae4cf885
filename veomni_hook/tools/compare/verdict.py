"""The verdict of a comparison: on the step time, on the losses, and one sentence about both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from veomni_hook.tools.compare.figures import LossDifference, Side
from veomni_hook.tools.compare.runs import Run
from veomni_hook.tools.significance import FASTER, FEW, MARGIN, NOISY, SAME, Comparison

__all__ = ["Verdict", "percent", "problems_of", "readable_time", "tolerance", "verdict", "why"]

#: Rounding explains differences up to this; larger ones must also occur between runs without the hook.
TOLERANCE = 1e-4
LOW_TOLERANCE = 2e-2
LOW_PRECISION = ("bfloat16", "float16", "float8")
#: Differences up to this multiple of those between runs without the hook count as the script's own noise.
OWN_NOISE = 2.0


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        time: the verdict of `veomni_hook.tools.significance`, or ``unknown`` without step times.
        loss: ``agree``, ``own noise`` (they differ as runs without the hook do), ``differ`` or ``unknown``.
        sentence: both as a sentence, with figures.
    """

    time: str
    loss: str
    sentence: str

    @property
    def ok(self) -> bool:
        """Whether losses differ by no more than rounding and the script's own noise."""
        return self.loss != "differ"


def tolerance(precision: str) -> float:
    """Return the relative difference of losses that rounding explains, for the lowest precision in use."""
    return LOW_TOLERANCE if precision.startswith(LOW_PRECISION) else TOLERANCE


def verdict(
    comparison: Comparison | None,
    sides: tuple[Side, Side],
    between: LossDifference,
    own: LossDifference,
    limit: float,
) -> Verdict:
    """Judge a comparison.

    Args:
        comparison: the step times compared.
        sides: the figures of the runs without the hook, and of those with it.
        between: losses with the hook against losses without.
        own: losses of runs without the hook against each other.
        limit: what `tolerance` returned.
    """
    time, said_of_time = _of_time(comparison, *sides)
    loss, said_of_loss = _of_loss(between, own, limit)
    joint = "; " if time == NOISY else " and " if loss != "differ" else ", but "
    return Verdict(time, loss, f"{said_of_time}{joint}{said_of_loss}.")


def _of_time(comparison: Comparison | None, without: Side, with_hook: Side) -> tuple[str, str]:
    if comparison is None or without.median is None or with_hook.median is None:
        return "unknown", "Step times are unknown (fewer than two steps were seen in the runs of one kind)"
    medians = f"median {readable_time(with_hook.median)}, was {readable_time(without.median)}"
    if comparison.verdict == FEW:
        return FEW, f"Too few steps count to compare step times ({medians}; raise --steps)"
    if comparison.noise is None:
        medians += "; with fewer than two runs of each kind, the noise between runs is unknown"
    noise = comparison.noise or 0.0
    if comparison.verdict == SAME:
        known = percent(max(1 - comparison.low, comparison.high - 1))
        said = f"With the hook a step takes the same time to within {known}"
    elif comparison.verdict != NOISY:
        words = "of the time" if comparison.verdict == FASTER else "times as long"
        said = f"With the hook a step takes {comparison.ratio:.2f} {words}"
    elif noise > MARGIN:
        said = (
            "The machine is too noisy to tell a difference in step time: medians of runs of the same kind "
            f"differ by {percent(noise)}"
        )
    else:
        known = percent(max(comparison.high / comparison.ratio, comparison.ratio / comparison.low) - 1)
        said = (
            "The step times show no clear difference: they vary too much within the runs (the ratio is known "
            f"to {known})"
        )
    return comparison.verdict, f"{said} ({medians})"


def _of_loss(between: LossDifference, own: LossDifference, limit: float) -> tuple[str, str]:
    if between.largest is None:
        return "unknown", "the losses are unknown"
    if between.largest <= limit:
        if between.identical:
            return "agree", "the losses are identical"
        return "agree", f"the losses agree (largest relative difference {between.largest:.1e})"
    if own.largest is not None and between.largest <= OWN_NOISE * own.largest:
        if own.largest > LOW_TOLERANCE:
            return (
                "own noise",
                "the losses differ no more than those of two runs without the hook, but these differ a lot "
                f"({percent(own.largest)}; a fixed seed in the script makes the comparison more precise)",
            )
        return "own noise", f"the losses agree within the script's own noise ({own.largest:.1e})"
    compared = "there is no second run without the hook to compare with"
    if own.largest is not None:
        compared = f"two runs without it differ by {own.largest:.1e}"
    return (
        "differ",
        f"the losses DIFFER: by {between.largest:.1e} of their size at step {between.step}, "
        f"more than rounding explains ({limit:.0e}); {compared}",
    )


def problems_of(runs: Sequence[Run], steps: int) -> list[str]:
    """Return what could not be measured or did not happen as requested, as sentences."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        for note in (*run.notes, *_problems_of(run, steps)):
            labels.setdefault(note, []).append(run.label)
    problems = [
        f"{'all runs' if len(runs) == len(of) > 1 else ', '.join(of)}: {note}" for note, of in labels.items()
    ]
    seen = [run for run in runs if run.times]
    if seen and not any(loss is not None for run in seen for loss in run.losses):
        problems.append("losses are unknown: backward was not called on a scalar")
    if seen and all(count is None for run in seen for count in run.tokens[1:]):
        problems.append(
            "tokens are unknown: no transformers model was called with input_ids, inputs_embeds or labels"
        )
    hooked = [run for run in seen if run.hooked]
    if hooked and not any(run.facts.get("kernels") for run in hooked):
        gone = any(run.facts.get("model_called") and not run.facts.get("models") for run in hooked)
        problems.append(
            "which kernels ran is unknown: the script ended by itself, and its model was gone by then; "
            "use fewer --steps"
            if gone
            else "the hook patched nothing that the script trains: no transformers model with kernel slots "
            "was called"
        )
    return list(dict.fromkeys(problems))


def _problems_of(run: Run, steps: int) -> Iterator[str]:
    if run.ended_by_us:
        yield f"`compare` stopped it, because {run.ended_by_us}"
    if run.failed:
        return
    if not run.attached:
        yield (
            "no process of it could be observed: none imported torch, or Python was started with -I, -E or -S"
        )
    elif not run.times:
        yield (
            f"no optimizer step was seen (calls of backward: {run.facts.get('backwards', 0)}): no "
            "torch.optim.Optimizer made a step, or its step was compiled or captured"
        )
    elif len(run.times) < steps:
        yield f"the script ended after {len(run.times)} of {steps} steps"


def percent(share: float) -> str:
    """Return a share as text, in percent."""
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"


def readable_time(seconds: float) -> str:
    """Return a duration as text, with at least three digits."""
    if seconds == 0:
        return "0 s"
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    return (
        f"{milliseconds:.0f} ms"
        if milliseconds >= 100
        else f"{milliseconds:.{1 if milliseconds >= 10 else 2}f} ms"
    )


#: A device that waits for more than this share of a step is said to wait.
WAITS = 0.15


def why(runs: Sequence[Run], without: Side, with_hook: Side, ratio: float) -> list[str]:
    """Return sentences about what keeps the ``ratio`` of step times near or above 1; none if it is below."""
    if ratio < 1 - MARGIN:
        return []
    said = []
    plain, hooked = _profile(runs, hooked=False), _profile(runs, hooked=True)
    if plain is not None and without.median:
        share = min(plain["kept"] / (plain.get("busy") or without.median), 1.0)
        of = "the device's time" if "busy" in plain else "a step"
        said.append(
            f"Without the hook, matrix products, convolutions and attention take {percent(share)} of {of}. "
            f"Most kernels leave these as they are, and shorten only the other {percent(1 - share)}."
        )
    if hooked is not None and "busy" in hooked and with_hook.median:
        idle = max(1 - hooked["busy"] / with_hook.median, 0.0)
        said.append(
            f"With the hook, the device waits for the host in {percent(idle)} of a step, so faster kernels "
            "do not show. More tokens in a step, or torch.compile, help."
            if idle > WAITS
            else f"With the hook, the device computes in {percent(1 - idle)} of a step."
        )
    return [*said, *next((run.facts["explained"] for run in runs if run.facts.get("explained")), [])]


def _profile(runs: Sequence[Run], *, hooked: bool) -> dict[str, float] | None:
    """Return the shortest profile of runs of a kind: the one that was disturbed least."""
    profiles = [run.facts["profile"] for run in runs if run.hooked is hooked and run.facts.get("profile")]
    return min(profiles, key=lambda one: one["kept"], default=None)

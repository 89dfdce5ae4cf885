"""Why a step is not faster with the hook, as far as the runs show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from veomni_hook.tools.compare.figures import Side
from veomni_hook.tools.compare.runs import Run
from veomni_hook.tools.compare.verdict import percent
from veomni_hook.tools.significance import MARGIN

__all__ = ["why"]

#: A device that waits for more than this share of a step is said to wait.
WAITS = 0.15


def why(runs: Sequence[Run], without: Side, with_hook: Side, ratio: float) -> list[str]:
    """Return sentences about what keeps the ``ratio`` of step times near or above 1; none if it is below."""
    if ratio < 1 - MARGIN:
        return []
    return [
        *_kept(_profile(runs, hooked=False), without),
        *_waits(_profile(runs, hooked=True), with_hook),
        *next((run.facts["explained"] for run in runs if run.facts.get("explained")), []),
    ]


def _profile(runs: Sequence[Run], *, hooked: bool) -> dict[str, float] | None:
    """Return the shortest profile of runs of a kind: the one that was disturbed least."""
    profiles = [run.facts["profile"] for run in runs if run.hooked is hooked and run.facts.get("profile")]
    return min(profiles, key=lambda one: one["kept"], default=None)


def _kept(profile: dict[str, float] | None, side: Side) -> Iterator[str]:
    """Say how much of a step there is that most kernels do not change."""
    if profile is None or not side.median:
        return
    share = min(profile["kept"] / (profile.get("busy") or side.median), 1.0)
    of = "the device's time" if "busy" in profile else "a step"
    yield (
        f"Without the hook, matrix products, convolutions and attention take {percent(share)} of {of}. "
        f"Most kernels leave these as they are, and shorten only the other {percent(1 - share)}."
    )


def _waits(profile: dict[str, float] | None, side: Side) -> Iterator[str]:
    """Say whether the device waits for the host."""
    if profile is None or "busy" not in profile or not side.median:
        return
    idle = max(1 - profile["busy"] / side.median, 0.0)
    if idle > WAITS:
        yield (
            f"With the hook, the device waits for the host in {percent(idle)} of a step, so faster kernels "
            "do not show. More tokens in a step, or torch.compile, help."
        )
    else:
        yield f"With the hook, the device computes in {percent(1 - idle)} of a step."

"""The results of one run: the figures of its ranks, read from the files that its processes wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from veomni_hook.tools.compare.plan import ATTACHED, PROGRESS, RESULT
from veomni_hook.tools.facts import Facts

__all__ = ["Run", "progress", "read", "written"]


@dataclass
class Run:
    """One run of the script.

    Attributes:
        hooked: whether it had the hook.
        turn: its number among the runs of its kind, from 1.
        status: exit status; negative: the signal.
        stopped: whether it was stopped after the requested steps.
        attached: whether one of its processes imported torch and was observed.
        ended_by_us: why `compare` ended it; empty if it ended by itself.
        said: the last lines that it printed.
        times: the end of each step, in seconds since the start of the command.
        first_call: when the model was first called, or None.
        losses: by step; None if backward was not called on a scalar.
        tokens: by step, summed over all ranks; None if unknown.
        facts: what else its rank 0 recorded.
        notes: what users should know about it.
    """

    hooked: bool
    turn: int
    status: int = 0
    stopped: bool = False
    attached: bool = False
    ended_by_us: str = ""
    said: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    first_call: float | None = None
    losses: list[float | None] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name of the run for people."""
        return f"{'with' if self.hooked else 'without'} the hook, run {self.turn}"

    @property
    def failed(self) -> bool:
        """Whether it ended with an error before it was stopped."""
        return self.status != 0 and not self.stopped

    @property
    def seconds(self) -> list[float]:
        """The time of each step after the first."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def to_dict(self) -> Facts:
        """Return the run as JSON-ready values."""
        return {
            "label": self.label,
            "hooked": self.hooked,
            "status": self.status,
            "stopped": self.stopped,
            "ended_by_us": self.ended_by_us,
            "steps": len(self.times),
            "step_seconds": self.seconds,
            "time_to_first_step": self.times[0] if self.times else None,
            "losses": self.losses,
            "tokens": self.tokens,
            "peak_bytes": self.facts.get("peak"),
            "world": self.facts.get("world"),
            "optimizer": self.facts.get("optimizer"),
            "skipped_steps": self.facts.get("skipped", 0),
            "last_lines": self.said if self.failed else [],
            "notes": self.notes,
        }


def progress(folder: Path) -> int:
    """Return how many steps the fastest process of a running script has done."""
    return max((file.stat().st_size for file in folder.glob(f"{PROGRESS}*")), default=0)


def written(folder: Path) -> bool:
    """Whether a process has written its record."""
    return any(folder.glob(f"{RESULT}*.json"))


def read(run: Run, folder: Path) -> Run:
    """Read what the processes of a run wrote into the run, and return it."""
    run.attached = any(folder.glob(f"{ATTACHED}*"))
    records = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{RESULT}*.json"))
    ]
    ranks: dict[int, Facts] = {}
    for record in sorted(records, key=lambda one: len(one["times"])):
        ranks[record["rank"]] = record  # the one with the most steps is used
    if len(records) > len(ranks):
        run.notes.append(
            f"{len(records)} processes trained; for each rank, the one with the most steps counts"
        )
    if not ranks:
        return run
    first = ranks[min(ranks)]
    run.facts = first
    run.stopped = first["stopped"]
    run.times, run.first_call, run.losses = first["times"], first["first_call"], first["losses"]
    run.tokens = _tokens(list(ranks.values()), len(run.times))
    run.notes += first["notes"]
    if len(ranks) < first["world"]:
        run.notes.append(f"{len(ranks)} of {first['world']} ranks were observed; only their tokens count")
    if run.stopped and run.status:
        run.notes.append(f"it ended with exit status {run.status} after its last step")
    return run


def _tokens(ranks: Sequence[Facts], steps: int) -> list[int | None]:
    """Add the ranks' tokens by step; unknown if one of them is unknown."""
    total: list[int | None] = []
    for step in range(steps):
        counts = [rank["tokens"][step] if step < len(rank["tokens"]) else None for rank in ranks]
        known = [one for one in counts if one is not None]
        total.append(sum(known) if len(known) == len(counts) and any(known) else None)
    return total

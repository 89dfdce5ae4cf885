"""What a part of the stress suite found: lines of counts, failures in words, and both as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: The columns of every table.
COLUMNS = ("part", "what", "how many", "entries lost", "wrong results", "other failures", "note")


@dataclass
class Line:
    """One row: what was done, how often, and what went wrong.

    Attributes:
        what: what was done, in a few words.
        count: how often.
        lost: cache entries that were complete and are gone, torn or unusable afterwards.
        wrong: runs whose result was another than that of the original.
        failed: everything else that must not happen.
        note: what else is worth a word.
    """

    what: str
    count: int = 0
    lost: int = 0
    wrong: int = 0
    failed: int = 0
    note: str = ""

    @property
    def bad(self) -> int:
        """How much went wrong."""
        return self.lost + self.wrong + self.failed


@dataclass
class Part:
    """One part of the suite: its seed, its lines, and each failure in words."""

    name: str
    seed: int
    seconds: float = 0.0
    lines: list[Line] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was tried and nothing went wrong."""
        return any(line.count for line in self.lines) and not any(line.bad for line in self.lines)

    def fail(self, line: Line, kind: str, text: str) -> None:
        """Count a failure in a line, by the field of its kind, and keep it in words."""
        setattr(line, kind, getattr(line, kind) + 1)
        self.failures.append(text)

    def total(self) -> Line:
        """All lines in one."""
        sums = {
            name: sum(getattr(line, name) for line in self.lines)
            for name in ("count", "lost", "wrong", "failed")
        }
        return Line("in all", **sums, note=f"{self.seconds:.0f} s, seed {self.seed}")

    def to_json(self) -> str:
        """The part as JSON, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Part:
        """The part that was written by `to_json`."""
        held: dict[str, Any] = json.loads(text)
        return cls(**{**held, "lines": [Line(**line) for line in held["lines"]]})


def table(parts: Iterable[Part]) -> list[tuple[str, ...]]:
    """The rows of a table with `COLUMNS`: every line of every part, and their sums."""
    rows = []
    for part in parts:
        for line in (*part.lines, part.total()):
            counts = (line.count, line.lost, line.wrong, line.failed)
            rows.append((part.name, line.what, *(f"{count:,}" for count in counts), line.note))
    return rows


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(one.replace('|', chr(92) + '|') for one in line)} |\n" for line in lines)

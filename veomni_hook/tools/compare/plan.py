"""What a run passes to its processes in the environment, and the names of the files that they write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ATTACHED",
    "BOOTSTRAP",
    "PLANNED",
    "PROGRESS",
    "RESULT",
    "Plan",
    "order",
    "ordered",
    "write_whole",
]

#: The folder that is put first in PYTHONPATH.
BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")

#: Prefixes of file names: a process observes torch; one byte per step; the record.
ATTACHED, PROGRESS, RESULT = "attached-", "progress-", "result-"

#: Of `veomni-hook plan`: what is to be predicted; what was.
_ORDER, PLANNED = "order.json", "planned.json"

# Not `VEOMNI_...`: those are settings of the hook, which warns about misspelt ones.
_FOLDER, _STEPS, _STARTED = "_VEOMNI_COMPARE_FOLDER", "_VEOMNI_COMPARE_STEPS", "_VEOMNI_COMPARE_STARTED"


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        folder: where the processes write.
        steps: the number of optimizer steps after which the script is stopped.
        started: when the command was started, in seconds since the epoch.
    """

    folder: str
    steps: int
    started: float

    def variables(self) -> dict[str, str]:
        """Return the plan as environment variables."""
        return {_FOLDER: self.folder, _STEPS: str(self.steps), _STARTED: repr(self.started)}

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Plan | None:
        """Return the plan in an environment, or None."""
        if _FOLDER not in environ:
            return None
        return cls(environ[_FOLDER], int(environ[_STEPS]), float(environ[_STARTED]))


def order(folder: str, *, memory: int | None, reach: int | None, setting: str) -> None:
    """Let the processes of a run predict a step, and not be recorded; ``setting``: the user's ``memory``."""
    with open(os.path.join(folder, _ORDER), "w", encoding="utf-8") as file:
        json.dump({"memory": memory, "reach": reach, "setting": setting}, file)


def ordered(folder: str) -> Any:
    """Return what `order` was called with, by name; None if it was not."""
    try:
        with open(os.path.join(folder, _ORDER), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def write_whole(path: str, facts: object) -> None:
    """Write a JSON file, which others see whole or not at all."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(facts, file)
    os.replace(f"{path}.part", path)

"""What a run passes to its processes in the environment, and the names of the files that they write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "ATTACHED",
    "BOOTSTRAP",
    "PLANNED",
    "PROGRESS",
    "RESULT",
    "Plan",
    "write_whole",
]

#: The folder that is put first in PYTHONPATH.
BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")

#: Prefixes of file names: a process observes torch; one byte per step; the record.
ATTACHED, PROGRESS, RESULT = "attached-", "progress-", "result-"

#: The file of `veomni-hook plan`: what was predicted.
PLANNED = "planned.json"

# Not `VEOMNI_...`: those are settings of the hook, which warns about misspelt ones.
_PLAN = "_VEOMNI_COMPARE"


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        folder: where the processes write.
        steps: the number of optimizer steps after which the script is stopped.
        started: when the command was started, in seconds since the epoch.
        order: of `veomni-hook plan`: a step is predicted and nothing is recorded, with ``memory`` and
            ``reach`` as `planned` takes them, and the user's setting ``memory`` as ``setting``.
    """

    folder: str
    steps: int
    started: float
    order: Mapping[str, Any] | None = None

    def variables(self) -> dict[str, str]:
        """Return the plan as an environment variable."""
        return {_PLAN: json.dumps(asdict(self))}

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Plan | None:
        """Return the plan in an environment, or None."""
        return cls(**json.loads(environ[_PLAN])) if _PLAN in environ else None


def write_whole(path: str, facts: object) -> None:
    """Write a JSON file, which others see whole or not at all."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(facts, file)
    os.replace(f"{path}.part", path)

"""What a run tells its processes through their environment, and the names of the files that they write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ATTACHED", "BOOTSTRAP", "PROGRESS", "RESULT", "Plan"]

#: The folder that goes to the front of PYTHONPATH.
BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")

#: How the names of files begin: a process observes torch; a byte for each step; what was recorded.
ATTACHED, PROGRESS, RESULT = "attached-", "progress-", "result-"

# Not `VEOMNI_...`: those are settings of the hook, and misspelt ones are a warning.
_FOLDER, _STEPS, _STARTED = "_VEOMNI_COMPARE_FOLDER", "_VEOMNI_COMPARE_STEPS", "_VEOMNI_COMPARE_STARTED"


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        folder: where the processes write.
        steps: after how many optimizer steps the script is stopped.
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
        """Return the plan that an environment holds, or None."""
        if _FOLDER not in environ:
            return None
        return cls(environ[_FOLDER], int(environ[_STEPS]), float(environ[_STARTED]))

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.ranks import Ranks
from veomni_hook.patches import expert_release


@pytest.fixture
def divided_by_transformers():
    """For what releases lack whose experts this package divides."""
    if not expert_release.dispatches():
        pytest.skip(f"needs transformers {expert_release.DISPATCHES}")


class Crew:
    """``size`` ranks with a setting, which share a folder for checkpoints."""

    def __init__(self, ranks: Ranks, folder: Path, size: int, setting: str) -> None:
        self._ranks, self.size, self._setting, self._folder = ranks, size, setting, folder
        folder.mkdir()

    def run(self, case: str, /, **arguments: Any) -> list[Any]:
        """Return what a function of the modules of cases returned on each rank."""
        return self._ranks.run(
            f"experts.{case}", self.size, self._setting, folder=str(self._folder), **arguments
        )


@pytest.fixture(scope="session")
def crew(ranks):
    """Crews by size and setting."""
    known: dict[tuple[int, str], Crew] = {}

    def of(size: int, setting: str = "") -> Crew:
        key = size, setting
        if key not in known:
            known[key] = Crew(ranks, ranks.folder / f"{size}{setting}", size, setting)
        return known[key]

    return of


@pytest.fixture(scope="session")
def two(crew):
    return crew(2)


@pytest.fixture(scope="session")
def four(crew):
    return crew(4)


@pytest.fixture(scope="session")
def told(crew):
    """Two ranks of a job with ``VEOMNI_PARALLEL="ep=2"``."""
    return crew(2, "ep=2")


@pytest.fixture(scope="session")
def told_both(crew):
    """Four ranks of a job with ``VEOMNI_PARALLEL="sp=2,ep=2"``."""
    return crew(4, "sp=2,ep=2")

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.experts.crew import Crew


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Two ranks."""
    crew = Crew(2, tmp_path_factory.mktemp("two"))
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Four ranks."""
    crew = Crew(4, tmp_path_factory.mktemp("four"))
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Two ranks of a job with ``VEOMNI_PARALLEL="ep=2"``."""
    crew = Crew(2, tmp_path_factory.mktemp("told"), VEOMNI_PARALLEL="ep=2")
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def told_both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Four ranks of a job with ``VEOMNI_PARALLEL="sp=2,ep=2"``."""
    crew = Crew(4, tmp_path_factory.mktemp("both"), VEOMNI_PARALLEL="sp=2,ep=2")
    yield crew
    crew.stop()

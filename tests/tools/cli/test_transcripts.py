"""What commands print in a process of their own, with the stand-in for transformers: see `transcript`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import REPOSITORY, Command
from .transcript import compare


@pytest.mark.parametrize("name", ["cache", "check", "doctor", "explain", "list", "source", "wrong_use"])
def test_what_is_printed(name: str, tiny: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {"REPOSITORY": REPOSITORY}
    compare(
        name,
        lambda words, variables: tiny(*words, **{"VEOMNI_CACHE_DIR": str(tmp_path / "cache"), **variables}),
        folders,
    )

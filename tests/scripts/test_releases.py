from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from scripts import releases
from scripts.releases import REQUIRED, judged, shortfalls, table, wheel


def totals(**shares: float) -> dict[str, dict[str, object]]:
    found = {op: {"op": op, "share": 100.0, "routed": 10, "candidates": 10} for op in REQUIRED}
    return found | {
        op: {"op": op, "share": share, "routed": 9, "candidates": 10} for op, share in shares.items()
    }


def test_the_newest_release_has_to_keep_the_promise() -> None:
    assert shortfalls({"2": totals(rms_norm=98.0)}, newest="2") == []
    assert shortfalls({"2": totals(rms_norm=97.9)}, newest="2") == [
        "rms_norm in 2: 97.9 %, promised are 98 %"
    ]


def test_the_others_may_be_three_points_below() -> None:
    assert shortfalls({"1": totals(rms_norm=95.0)}, newest="2") == []
    assert len(shortfalls({"1": totals(rms_norm=94.9)}, newest="2")) == 1


def test_an_op_that_is_not_there_is_too_low() -> None:
    found = totals()
    del found["rotary"]
    assert shortfalls({"2": found}, newest="2") == ["rotary in 2: 0.0 %, promised are 94 %"]


def test_the_table_has_a_column_for_each_release() -> None:
    found = {
        "1": totals(rms_norm=90.0),
        "2": totals() | {"new": {"share": 100.0, "routed": 0, "candidates": 0}},
    }
    lines = table(found)
    assert lines[:2] == ["| op | 1 | 2 |", "|---|---|---|"]
    assert "| rms_norm | 90.0 (9/10) | 100.0 (10/10) |" in lines and "| new | - | - |" in lines


def test_a_wheel_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        asked.append(command)
        (tmp_path / "transformers-5.9.9-py3-none-any.whl").touch()

    monkeypatch.setattr(releases.subprocess, "run", run)
    assert wheel("5.9.9", tmp_path) == wheel("5.9.9", tmp_path)
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "transformers==5.9.9"
    assert "--no-deps" in command


def test_a_release_in_which_something_fails_has_no_figures(tmp_path: Path) -> None:
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("transformers/models/tiny/modeling_tiny.py", "def f(:\n")
    with pytest.raises(SystemExit, match=r"some\.whl ended with status 1"):
        judged(path)


def test_a_wheel_is_judged_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("transformers/__init__.py", "__version__ = '5.9.9'\n")
        archive.writestr("transformers/models/tiny/modeling_tiny.py", "x = 1\n")
    assert all(total["candidates"] == 0 for total in judged(path).values())

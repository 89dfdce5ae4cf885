from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from scripts import releases
from scripts.releases import LOOPS, REQUIRED, frozen, judged, loops, losses, shortfalls, table, wheel
from veomni_hook.tools.coverage import ROUTED, Row, Total


def totals(**shares):
    given = dict.fromkeys(REQUIRED, 100.0) | shares
    return {
        op: Total(op, candidates=1000, routed=round(10 * share), unbound=0, missed=0)
        for op, share in given.items()
    }


def row(op, variant="", status=ROUTED):
    return Row("m", "t", op, variant, status, "")


def test_the_newest_release_has_to_keep_the_promise():
    assert shortfalls({"2": totals(rms_norm=98.0)}, newest="2") == []
    assert shortfalls({"2": totals(rms_norm=97.9)}, newest="2") == [
        "rms_norm in 2: 97.9 %, but 98 % are required"
    ]


def test_the_others_may_be_three_points_below():
    assert shortfalls({"1": totals(rms_norm=95.0)}, newest="2") == []
    assert len(shortfalls({"1": totals(rms_norm=94.9)}, newest="2")) == 1


def test_an_op_that_is_not_there_is_too_low():
    found = totals()
    del found["rotary"]
    assert shortfalls({"2": found}, newest="2") == ["rotary in 2: 0.0 %, but 94 % are required"]


def test_a_row_has_a_cell_for_each_release() -> None:
    found = {
        "1": totals(rms_norm=90.0),
        "2": totals() | {"new": Total("new", candidates=0, routed=0, unbound=0, missed=0)},
    }
    rows = [*table(found)]
    shares = {"1": "90.0 (900/1000)", "2": "100.0 (1000/1000)"}
    assert {"op": "rms_norm", "formulas": "all", **shares} in rows
    assert {"op": "new", "formulas": "all", "1": "-", "2": "-"} in rows
    unseen = [*table({"2": found["2"]}, "up to 1", releases=found)]
    assert {"op": "rms_norm", "formulas": "up to 1", **shares, "1": "-"} in unseen


def test_every_loop_over_layers_is_split_or_refused():
    loop = Total(LOOPS, candidates=10, routed=4, unbound=0, missed=0, refused=6)
    found = {"1": totals() | {LOOPS: loop}, "2": totals() | {LOOPS: replace(loop, refused=5, missed=1)}}
    assert [(row["op"].partition(": ")[2], row["1"], row["2"]) for row in loops(found)] == [
        ("can be split", "4", "4"),
        ("refused with a reason", "6", "5"),
        ("neither", "0", "1"),
    ]
    assert not any("layer_loop" in row["op"] for row in table(found))
    assert shortfalls(found, newest="2") == [f"{LOOPS} in 2: 1 without a verdict"]


def test_a_wheel_is_downloaded_once(tmp_path, monkeypatch):
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        (tmp_path / "transformers-5.9.9-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert wheel("5.9.9", tmp_path) == wheel("5.9.9", tmp_path)
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "transformers==5.9.9"
    assert "--no-deps" in command and command[command.index("--dest") + 1] == str(tmp_path)


def test_a_release_in_which_something_fails_has_no_figures(tmp_path):
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("transformers/models/tiny/modeling_tiny.py", "def f(:\n")
    with pytest.raises(
        SystemExit, match=r"some\.whl: transformers\.models\.tiny\.modeling_tiny: .*cannot be parsed"
    ):
        judged(path)


def test_a_wheel_is_judged_as_it_is(tmp_path):
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("transformers/__init__.py", "__version__ = '5.9.9'\n")
        archive.writestr("transformers/models/tiny/modeling_tiny.py", "x = 1\n")
    assert judged(path) == []


def test_a_release_that_nobody_has_looked_at():
    rows = {
        "5.9.0": [row("rotary", "half_split")],
        releases.FROZEN: [row("rotary", "pairs|half_split")],
        "5.20.2": [
            row("rotary", "pairs"),
            row("rotary", "new"),
            row("rotary", "pairs|new"),
            row("rotary", status="missed"),
        ],
        "5.22.2": [row("rms_norm", "pairs")],
    }
    found = frozen(rows)
    assert list(found) == ["5.20.2", "5.22.2"]
    assert (found["5.20.2"]["rotary"].routed, found["5.20.2"]["rotary"].missed) == (1, 3)
    assert found["5.22.2"]["rms_norm"].routed == 0, "a variant belongs to its op"


def test_what_it_may_lose():
    unseen = {"5.22.2": totals(rms_norm=97.9, moe_experts=94.0)}
    assert losses(totals(), unseen) == [
        "rms_norm in 5.22.2 with only the formulas up to 5.17.0: 97.9 %, 100.0 % in 5.17.0"
    ]

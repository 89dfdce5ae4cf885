"""`veomni-hook run --nproc N --sp N --ep N`: processes of torchrun, and the sizes that they share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from veomni_hook.tools.cli.run.processes import settings_with, several
from veomni_hook.tools.cli.run.program import python
from veomni_hook.tools.cli.usage import UsageError

from ..conftest import Command

RANK = """
import json, os, sys, time
from pathlib import Path
from veomni_hook.finders.state import STATE
from veomni_hook.parallel.process import sizes

names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
told = [*(os.environ[name] for name in names), str(sizes()), bool(STATE.handles), sys.argv[1:]]
Path(os.environ["RANK"]).write_text(json.dumps(told))
while not Path("0").exists():
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    raise KeyError("here")
time.sleep(600)
"""


def test_ranks_have_the_hook_and_the_sizes_and_a_failing_one_ends_all(
    veomni: Command, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(RANK)
    done = veomni("run", "--nproc", "2", "--sp", "2", "--ep=1", "script.py", "--sp", "7", OMP_NUM_THREADS="1")
    told = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    assert told == [[rank, "2", "2", "sp=2", True, ["--sp", "7"]] for rank in "01"]
    assert done.status == 1
    assert "line 13, in <module>\n    raise KeyError" in done.err and "KeyError: 'here'" in done.err
    assert "script.py FAILED" in done.err, "torchrun's last word names the rank"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VEOMNI_PARALLEL", raising=False)
    (tmp_path / "train.py").touch()
    return tmp_path


def test_scripts_and_modules_are_torchruns(folder: Path) -> None:
    settings = settings_with({"sp": 2, "ep": 4})
    launcher = [*python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    assert several(["train.py", "--lr", "1"], None, "8", settings) == [*launcher, "train.py", "--lr", "1"]
    assert several(["-m", "x"], "package.train", "8", settings) == [
        *launcher,
        "-m",
        "package.train",
        "-m",
        "x",
    ]


@pytest.mark.parametrize("word", ["gpu", "auto"])
def test_devices_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    counts = {"gpu": 6, "auto": 6}
    monkeypatch.setattr("torch.distributed.run.determine_local_world_size", counts.__getitem__)
    assert several(["train.py"], None, word, settings_with({"sp": 3}))[-2:] == ["6", "train.py"]
    with pytest.raises(UsageError) as caught:
        several(["train.py"], None, word, settings_with({"sp": 2, "ep": 4}))
    assert caught.value.what == "ep=4 does not divide the 6 processes"
    assert "choose ep from 1, 2, 3, 6" in caught.value.fix


@pytest.mark.parametrize(
    ("file", "variable", "options", "expected"),
    [
        ("", "", {}, ""),
        ("", "", {"sp": 2}, "sp=2"),
        ("", "sp=2", {"sp": 2}, "sp=2"),
        ("", "sp=2,ep=4", {"sp": 2}, "sp=2,ep=4"),
        ("ep=2", "", {"sp": 2}, "sp=2,ep=2"),
        ("sp=4,ep=2", "", {"sp": 1}, "ep=2"),
        ("sp=4", "none", {}, ""),
    ],
)
def test_options_are_stronger_than_a_file(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    variable: str,
    options: dict[str, int],
    expected: str,
) -> None:
    (folder / "veomni-hook.toml").write_text(f'parallel = "{file}"\n')
    monkeypatch.setenv("VEOMNI_PARALLEL", variable)
    assert settings_with({"sp": options.get("sp"), "ep": None}).parallel == expected


def test_one_process_shares_nothing_though_a_file_says_so(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "veomni-hook.toml").write_text('parallel = "sp=2"\n')
    (tmp_path / "script.py").write_text("from veomni_hook.parallel.process import sizes; print(sizes())")
    assert veomni("run", "--sp", "1", "script.py").out == "none\n"
    assert veomni("run", "script.py").out == "sp=2\n"

"""What people type after `veomni-hook run`, and which program it is."""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from veomni_hook.tools.cli.run import program as program_module
from veomni_hook.tools.cli.run.program import command_of, python
from veomni_hook.tools.cli.usage import UsageError

VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for this environment's console scripts, beside a folder on PATH and the working directory."""
    for name in ("own", "path", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(program_module, "_script_folders", lambda: iter([str(tmp_path / "own")]))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.chdir(tmp_path / "work")
    program(tmp_path / "own" / "python3", "#!/bin/sh\n")
    return tmp_path / "own"


def program(path: Path, text: str | bytes, mode: int = 0o755) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return str(path)


def test_python_is_this_environments(own: Path) -> None:
    for name in ("python", "python3", VERSION, str(own / "python3")):
        assert command_of([name, "-O", "x.py", "-c"]) == [*python(), "-O", "x.py", "-c"]
    other = program(own.parent / "path" / "python3.1", "")
    assert command_of(["python3.1", "x.py"]) == [other, "x.py"], "3.11 begins with 3.1"
    assert command_of([other, "-m", "pkg"]) == [other, "-m", "pkg"], "a path is taken as it is"


@pytest.mark.parametrize("flags", [["-I"], ["-OE", "x.py"], ["-W", "error", "-S", "x.py"], ["-Ic", "1"]])
def test_a_python_that_would_not_hear_of_the_hook(own: Path, flags: list[str]) -> None:
    with pytest.raises(UsageError, match=r"-[IES] ignores the environment"):
        command_of(["python", *flags])


@pytest.mark.parametrize(
    "arguments", [["-c", "1", "-I"], ["x.py", "-E"], ["-m", "pkg", "-S"], ["-WError"], ["-XI"], ["-", "-I"]]
)
def test_flags_of_the_script_are_its_own(own: Path, arguments: list[str]) -> None:
    assert command_of(["python", *arguments]) == [*python(), *arguments]


def test_a_file_is_pythons_unless_it_says_otherwise(own: Path) -> None:
    work = own.parent / "work"
    for name in ("train.py", "train"):
        program(work / name, "print()", 0o644)
        assert command_of([name, "--lr", "1"]) == [*python(), name, "--lr", "1"]
    program(work / "env", "#!/usr/bin/env -S python3 -u\n")
    assert command_of(["./env"]) == [*python(), "./env"]
    shell = program(work / "a.sh", "#!/bin/bash -e\n")
    assert command_of(["a.sh", "x"]) == [shell, "x"]
    program(work / "b.sh", "#!/usr/bin/env bash\n", 0o644)
    assert command_of(["b.sh"]) == ["/usr/bin/env", "bash", "b.sh"], "it may not be executed by itself"
    binary = program(work / "binary", b"\x7fELF\0\0")
    assert command_of(["./binary"]) == [binary]
    program(work / "c.sh", "echo\n", 0o644)
    with pytest.raises(UsageError, match=r"does not say for which shell(.|\n)*run bash c\.sh"):
        command_of(["c.sh"])


def test_a_pipe_is_left_to_python(own: Path) -> None:
    os.mkfifo("pipe")
    assert command_of(["./pipe"]) == [*python(), "./pipe"]


def test_console_scripts_of_this_environment_run_on_its_python(own: Path) -> None:
    path = own.parent / "path"
    (own.parent / "work" / "trl").mkdir()  # a folder in a clone does not hide the program
    (own.parent / "work" / "trl" / "__main__.py").touch()
    program(path / "trl", "#!/bin/sh\n")
    trl = program(own / "trl", "#!/elsewhere/bin/python3 -sE\nimport trl\n")
    assert command_of(["trl", "sft", "-m", "x"]) == [*python(), trl, "sft", "-m", "x"]
    long = program(own / "long", "#!/bin/sh\n'''exec' \"/a b/python3.11\" \"$0\" \"$@\"\n' '''\nimport x\n")
    assert command_of(["long"]) == [*python(), long]
    binary = program(own / "ruff", b"\x7fELF\0")
    assert command_of(["ruff", "check"]) == [binary, "check"]


def test_programs_on_path(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own.parent / "path"
    bash = program(path / "bash", b"\x7fELF\0")
    assert command_of(["bash", "train.sh"]) == [bash, "train.sh"]
    linked = program(path / "linked", f"#!{own}/python3\n")
    assert command_of(["linked"]) == [*python(), linked]
    assert capsys.readouterr().err == ""
    foreign = program(path / "foreign", "#!/opt/other/bin/python3\n")
    assert command_of(["foreign"]) == [foreign]
    assert "foreign runs on /opt/other/bin/python3, not on this environment's" in capsys.readouterr().err


def test_an_entry_point_without_a_file(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("tool", "os.path:basename", "console_scripts")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: EntryPoints([point]))
    code = "import sys, os.path; sys.argv[0] = 'tool'; sys.exit(os.path.basename())"
    assert command_of(["tool", "x"]) == [*python(), "-c", code, "x"]


def test_a_folder_comes_last(own: Path) -> None:
    folder = own.parent / "work" / "app"
    folder.mkdir()
    with pytest.raises(UsageError):
        command_of(["app"])
    (folder / "__main__.py").touch()
    assert command_of(["app"]) == [*python(), "app"]


def test_what_is_not_found_is_said_with_what_was_looked_for(own: Path) -> None:
    program(own / "torchrun", "#!/x/python\n")
    (own.parent / "work" / "train.py").touch()
    with pytest.raises(UsageError) as caught:
        command_of(["torchrum", "x.py"])
    error = caught.value
    assert error.what == "there is no script and no program 'torchrum'"
    assert all(part in error.where for part in (str(own.parent / "work" / "torchrum"), str(own), "on PATH"))
    assert "nearest: torchrun" in error.fix and "run -m package.module" in error.fix
    with pytest.raises(UsageError) as caught:
        command_of(["trainn.py"])
    assert caught.value.where == f"looked for: the file {own.parent / 'work' / 'trainn.py'}"
    assert "nearest: train.py" in caught.value.fix

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from veomni_hook import __version__
from veomni_hook.cli.app import COMMANDS, app

from .conftest import Command

LIGHT = [
    ["dump", "qwen3"],
    ["diff", "qwen3"],
    ["explain", "qwen3", "--fast"],
    ["list", "--all"],
    ["check"],
    ["check", "qwen3"],
    ["coverage", "qwen3"],
    ["list", "qwen3"],
    ["cache", "info"],
    ["cache", "warm"],
    ["cache", "verify"],
    ["doctor", "--fast"],
]


def test_the_help_names_every_command() -> None:
    done = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    words = {
        line.split()[1] for line in done.output.splitlines() if len(line.split()) > 2 and line.startswith("│")
    }
    assert set(COMMANDS) <= words


@pytest.mark.parametrize("command", [*COMMANDS, "cache info", "cache verify", "cache clear", "cache warm"])
def test_every_command_describes_itself(command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "-h"], env={"COLUMNS": "200"}, prog_name="veomni-hook")
    assert done.exit_code == 0
    assert f"Usage: veomni-hook {command}" in done.output


def test_the_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"veomni-hook {__version__}\n")


def test_an_unknown_command_is_wrong_use(tiny: Command) -> None:
    done = tiny("lits")
    assert (done.status, done.out) == (2, "")
    assert "Did you mean 'list'" in done.err


def test_errors_have_three_parts_on_stderr(tiny: Command) -> None:
    done = tiny("dump", "tiny", VEOMNI_DEVICE="tpu")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: ") and "\n  where: " in done.err and "\n  fix:   " in done.err
    assert "tpu" in done.err and "gpu" in done.err


def test_warnings_are_one_line_on_stderr(tiny: Command, tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    done = tiny("dump", "tiny", VEOMNI_CACHE_DIR=str(loose))
    assert done.status == 0 and "class TinyModel" in done.out
    assert done.err.startswith("warning: ") and str(loose) in done.err and done.err.count("\n") == 1


def test_no_command_that_only_reads_imports_torch_or_transformers(
    environ: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import json, sys\n"
        "from veomni_hook.cli.app import app\n"
        "found = {}\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    status = app(command, standalone_mode=False)\n"
        "    found[' '.join(command)] = [status, [m for m in ('torch', 'transformers') if m in sys.modules]]\n"
        "print(json.dumps(found), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(LIGHT)],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr.splitlines()[-1])
    assert found == {" ".join(command): [None, []] for command in LIGHT}


def test_a_reader_that_goes_away_is_no_traceback(tiny_environ: dict[str, str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for arguments in (["dump", "tiny"], ["list"]):
        done = subprocess.run(
            [sys.executable, "-m", "veomni_hook", *arguments],
            env=tiny_environ, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (141, "")
    os.close(writer)


COMPLETE = """
import sys
from veomni_hook.cli.app import main
try:
    main()
finally:
    heavy = [m for m in ("torch", "transformers", "veomni_hook.finders.pipeline") if m in sys.modules]
    print(heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dump qwen3_o", ["qwen3_omni_moe"]),
        ("diff transformers.models.qwen3.", ["transformers.models.qwen3.modeling_qwen3"]),
        ("explain blip_2", ["blip_2"]),
        ("cache w", ["warm"]),
        ("dump --device ", ["gpu", "npu"]),
        ("k", ["kernels"]),
    ],
)
def test_the_shell_completes(
    environ: dict[str, str], tmp_path: Path, words: str, expected: list[str]
) -> None:
    typed = f"veomni-hook {words}"
    variables = {
        "_VEOMNI_HOOK_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        env={**environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == expected
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_can_be_shown(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # typer asks which shell this process was started from; make and CI start it from none that it knows.
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: (shell, f"/bin/{shell}"))
    done = CliRunner().invoke(app, ["--show-completion"], prog_name="veomni-hook")
    assert done.exit_code == 0
    assert "_VEOMNI_HOOK_COMPLETE" in done.output

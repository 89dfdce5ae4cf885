from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from veomni_hook import __version__
from veomni_hook.tools.cli.app import COMMANDS, MOVED, PANELS, app

from .conftest import REPOSITORY, Command

LIGHT = [
    ["dump", "qwen3"],
    ["diff", "qwen3"],
    ["explain", "qwen3", "--fast"],
    ["explain", "qwen3", "--system", "sm90"],
    ["explain", "--system", "cpu"],
    ["report", "qwen3", "--system", "ascend"],
    ["list", "--by", "module", "--all"],
    ["check"],
    ["check", "qwen3"],
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
    assert {*COMMANDS} - words == {"bench"}, "which is hidden"
    assert [panel for panel in PANELS if f"─ {panel} ─" in done.output] == ["Try", "Look", "Maintain"]


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


@pytest.mark.parametrize("command", MOVED)
def test_a_command_of_earlier_says_what_it_is_now(command: str) -> None:
    done = CliRunner().invoke(app, [command, "qwen3", "--system", "ascend"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"there is no command '{command}' any more" in done.stderr and "fix:   use `veomni" in done.stderr


def test_no_command_that_only_reads_imports_torch_or_transformers(
    environ: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import json, sys\n"
        "from veomni_hook.tools.cli.app import app\n"
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
    for arguments in (["dump", "tiny"], ["explain", "--system", "cpu"]):
        done = subprocess.run(
            [sys.executable, "-m", "veomni_hook", *arguments],
            env=tiny_environ, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (141, "")
    os.close(writer)


@pytest.mark.parametrize(
    "command",
    [
        *("list qwen3", "explain qwen3 --fast", "explain rotary", "dump qwen3", "diff qwen3", "check qwen3"),
        *("doctor --fast", "cache info", "cache verify", "cache warm qwen3", "cache clear"),
    ],
)
def test_a_result_goes_to_a_file(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEOMNI_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    for _ in range(2):  # what the first one stores, others find
        printed = CliRunner().invoke(app, command.split())
    done = CliRunner().invoke(app, [*command.split(), "--output", str(tmp_path / "result")])
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"{printed.stderr}wrote {tmp_path / 'result'}\n"
    assert (tmp_path / "result").read_text() == printed.stdout != ""


COMPLETE = """
import sys
from veomni_hook.tools.cli.app import main
try:
    main()
finally:
    heavy = [m for m in ("torch", "transformers", "veomni_hook.finders.applicable") if m in sys.modules]
    print(heavy, file=sys.stderr)
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dump qwen3_o", ["qwen3_omni_moe"]),
        ("diff transformers.models.qwen3.", ["transformers.models.qwen3.modeling_qwen3"]),
        ("explain blip_2", ["blip_2"]),
        ("cache w", ["warm"]),
        ("dump --device ", ["gpu", "npu"]),
        ("co", ["compare"]),
        ("explain rms", ["rms_norm"]),
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


BASH = """
source <(veomni-hook --show-completion)
complete -p veomni-hook
for words in "list qwen3_o" "bench moe_r" "list --require moe_ro" "compa"; do
    COMP_WORDS=(veomni-hook $words)
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _veomni_hook_completion veomni-hook
    echo "${COMPREPLY[@]}"
done
"""


def test_the_script_of_bash_completes_in_bash(environ: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "veomni-hook"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m veomni_hook "$@"\n')
    program.chmod(0o700)
    variables = {**environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    registered, *completed = done.stdout.splitlines()
    assert registered.endswith("-F _veomni_hook_completion veomni-hook")
    assert completed == ["qwen3_omni_moe", "moe_router", "moe_router=", "compare"]


@pytest.mark.parametrize("arguments", [["explain"], ["explain", "qwen3"], ["report", "qwen3"]])
def test_what_needs_torch_says_so(environ: dict[str, str], tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    path = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    environment = {**environ, "PYTHONPATH": path, "VEOMNI_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "veomni_hook", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: this command needs torch\n") and "pip install torch" in done.stderr

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from veomni_hook.cli import run as run_module
from veomni_hook.cli.run import interpreter_flags, separated
from veomni_hook.cli.usage import UsageError

from .conftest import Command

REPORT = """
import json, sys
from veomni_hook.finders.state import STATE
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "file": __file__, "name": __name__, "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(), "active": bool(STATE.handles),
    "optimize": sys.flags.optimize, "torch": "torch" in sys.modules, "cli": "veomni_hook.cli" in sys.modules,
}))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["s.py", "--help"], ["--", "s.py", "--help"]),
        (["-m", "mod", "-m", "--help"], ["-m", "mod", "--", "-m", "--help"]),
        (["-mmod", "x"], ["-mmod", "--", "x"]),
        (["--module=mod", "-h"], ["--module=mod", "--", "-h"]),
        (["--module", "mod", "-h"], ["--module", "mod", "--", "-h"]),
        (["--", "-odd.py", "--", "x"], ["--", "-odd.py", "--", "x"]),
        (["--help"], ["--help"]),
        (["-m"], ["-m", "--"]),
        ([], []),
    ],
)
def test_the_rest_belongs_to_the_script(given: list[str], expected: list[str]) -> None:
    assert separated(given) == expected


def test_a_script_runs_as_python_runs_it(veomni: Command, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "script.py").write_text(REPORT)
    done = veomni("run", "elsewhere/script.py", "--help", "--", "-x", "a b")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "argv": ["elsewhere/script.py", "--help", "--", "-x", "a b"],
        "path0": str(folder),
        "file": str(folder / "script.py"),
        "name": "__main__",
        "package": None,
        "main": True,
        "active": True,
        "optimize": 0,
        "torch": False,
        "cli": False,
    }
    assert done.stderr == ""


def test_a_module_runs_as_python_runs_it(veomni: Command, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tool.py").write_text(REPORT)
    done = veomni("run", "-m", "package.tool", "--module", "-m", "x")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["argv"] == [str(package / "tool.py"), "--module", "-m", "x"]
    assert found["path0"] == str(tmp_path)
    assert (found["name"], found["package"], found["active"]) == ("__main__", "package", True)


@pytest.mark.parametrize(
    ("code", "status", "errors"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
    ],
)
def test_exit_statuses_are_the_scripts_own(
    veomni: Command, tmp_path: Path, code: str, status: int, errors: str
) -> None:
    (tmp_path / "script.py").write_text(code)
    done = veomni("run", "script.py")
    assert (done.returncode, done.stderr) == (status, errors)


def test_a_traceback_shows_the_script_alone(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def f():\n    raise KeyError('here')\nf()\n")
    done = veomni("run", "script.py")
    assert done.returncode == 1
    assert done.stderr.count("  File ") == 2
    assert "veomni_hook" not in done.stderr


def test_flags_of_the_interpreter_and_settings_reach_the_script(
    environ: dict[str, str], tmp_path: Path
) -> None:
    import subprocess

    (tmp_path / "script.py").write_text(
        "import os, sys\nfrom veomni_hook.finders.handle import current_settings\n"
        "print(sys.flags.optimize, sys.stdout.write_through, sys.warnoptions, os.getppid())\n"
        "os.chdir('/')\nprint(current_settings().kernels)\n"
    )
    (tmp_path / "veomni-hook.toml").write_text('kernels = "eager"\n')
    done = subprocess.run(
        [sys.executable, "-O", "-u", "-Wonce", "-m", "veomni_hook", "run", "script.py"],
        env=environ, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    # The parent is this process: run has become the script and does not wait beside it.
    assert done.stdout.split("\n")[:2] == [f"1 True ['once'] {os.getpid()}", "eager"], done.stderr


def test_a_hook_that_is_switched_off_is_said_and_stays_off(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('veomni_hook' in sys.modules)")
    done = veomni("run", "script.py", env={"VEOMNI_HOOK": "0"})
    assert done.stdout == "False\n"
    assert "switched off" in done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing_children_inherit_the_hook(veomni: Command, tmp_path: Path, method: str) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing, os, sys\n"
        "from veomni_hook.finders.state import STATE\n"
        "def child(queue):\n"
        "    queue.put((bool(STATE.handles), STATE.finder is sys.meta_path[0], os.getpid()))\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context('{method}')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    active, first, pid = queue.get(timeout=60)\n"
        "    process.join()\n"
        "    print(active, first, pid != os.getpid(), process.exitcode)\n"
    )
    done = veomni("run", "script.py")
    assert done.stdout == "True True True 0\n", done.stderr


def test_nothing_to_run_is_wrong_use(veomni: Command) -> None:
    done = veomni("run")
    assert done.returncode == 2
    assert "no script" in done.stderr and "run -m" in done.stderr


def test_an_illegal_setting_stops_before_the_script(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    done = veomni("run", "script.py", env={"VEOMNI_STRICT": "perhaps"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "VEOMNI_STRICT" in done.stderr and "perhaps" in done.stderr


def test_flags_that_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    monkeypatch.setattr(subprocess, "_args_from_interpreter_flags", lambda: ["-O", "-I", "-P"])
    started_with_m = type(sys)("__main__")
    started_with_m.__spec__ = sys.modules[run_module.__name__].__spec__
    monkeypatch.setitem(sys.modules, "__main__", started_with_m)
    with pytest.raises(UsageError, match="-I"):
        interpreter_flags()
    console_script = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", console_script)
    assert [flag for flag in interpreter_flags() if flag != "-u"] == ["-O"]

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
    "torch": "torch" in sys.modules, "cli": "veomni_hook.cli" in sys.modules,
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
    assert done.json == {
        "argv": ["elsewhere/script.py", "--help", "--", "-x", "a b"],
        "path0": str(folder),
        "file": str(folder / "script.py"),
        "name": "__main__",
        "package": None,
        "main": True,
        "active": True,
        "torch": False,
        "cli": False,
    }
    assert (done.status, done.err) == (0, "")


def test_a_module_runs_as_python_runs_it(veomni: Command, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tool.py").write_text(REPORT)
    found = veomni("run", "-m", "package.tool", "--module", "-m", "x").json
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
    assert (done.status, done.err) == (status, errors)


def test_a_missing_script_is_pythons_own_error(veomni: Command) -> None:
    done = veomni("run", "nowhere.py")
    assert done.status == 2
    assert "can't open file" in done.err and "Traceback" not in done.err


def test_a_traceback_shows_the_script_alone(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def f():\n    raise KeyError('here')\nf()\n")
    done = veomni("run", "script.py")
    assert done.status == 1
    assert done.err.count("  File ") == 2
    assert "veomni_hook" not in done.err


def test_flags_and_settings_reach_the_script(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "print(sys.flags.optimize, sys.stdout.write_through, sys.warnoptions, os.getppid())\n"
        "os.chdir('/')\n"
        "from veomni_hook.finders.handle import current_settings\n"
        "print(current_settings().kernels)\n"
    )
    (tmp_path / "veomni-hook.toml").write_text('kernels = "eager"\n')
    done = veomni("run", "script.py", flags=("-O", "-u", "-Wonce"))
    # The parent is this process: the command has become the script and does not wait beside it.
    assert done.out.splitlines() == [f"1 True ['once'] {os.getpid()}", "eager"], done.err


def test_a_hook_that_is_switched_off_is_said_and_stays_off(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('veomni_hook' in sys.modules)")
    done = veomni("run", "script.py", VEOMNI_HOOK="0")
    assert done.out == "False\n"
    assert "switched off" in done.err


def test_the_script_imports_patched_modules(tiny: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from transformers import TinyNorm; print(TinyNorm().forward(1))")
    assert tiny("run", "script.py").out == "103\n"
    assert tiny("run", "script.py", VEOMNI_PATCHES=None).out == "3\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing_children_import_patched_modules(tiny: Command, tmp_path: Path, method: str) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing, os, sys\n"
        "def child(queue):\n"
        "    from transformers import TinyNorm\n"
        "    queue.put((TinyNorm().forward(1), os.getpid()))\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context('{method}')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    value, pid = queue.get(timeout=60)\n"
        "    process.join()\n"
        "    print(value, pid != os.getpid(), process.exitcode, 'transformers' in sys.modules)\n"
    )
    done = tiny("run", "script.py")
    assert done.out == "103 True 0 False\n", done.err


TORCHRUN = """
import torch
import torch.distributed as dist
from transformers.models.qwen3 import modeling_qwen3
from veomni_hook.finders.early import is_patched

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
line = f"rank {dist.get_rank()}: {total.item():.0f} {is_patched(modeling_qwen3)}"
lines = [None, None]
dist.all_gather_object(lines, line)
if dist.get_rank() == 0:
    print(lines)
dist.destroy_process_group()
"""


def test_torchrun_workers_import_patched_modules(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TORCHRUN)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = veomni("run", *launcher, "script.py", OMP_NUM_THREADS="1")
    assert done.out == "['rank 0: 2 True', 'rank 1: 2 True']\n", done.err


def test_nothing_to_run_is_wrong_use(veomni: Command) -> None:
    done = veomni("run")
    assert done.status == 2
    assert "no script" in done.err and "run -m" in done.err


def test_an_illegal_setting_stops_before_the_script(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    done = veomni("run", "script.py", VEOMNI_STRICT="perhaps")
    assert (done.status, done.out) == (2, "")
    assert "VEOMNI_STRICT" in done.err and "perhaps" in done.err


def test_flags_that_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_args_from_interpreter_flags", lambda: ["-O", "-I", "-P"])
    started_with_m = ModuleType("__main__")
    started_with_m.__spec__ = sys.modules[run_module.__name__].__spec__
    monkeypatch.setitem(sys.modules, "__main__", started_with_m)
    with pytest.raises(UsageError, match="-I"):
        interpreter_flags()
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # as a console script has it
    assert [flag for flag in interpreter_flags() if flag != "-u"] == ["-O"]

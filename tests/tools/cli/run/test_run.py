from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from veomni_hook.tools.cli.run import command as run_module
from veomni_hook.tools.cli.run.program import interpreter_flags
from veomni_hook.tools.cli.usage import UsageError

from ..conftest import Command

REPORT = """
import json, sys
from veomni_hook.finders.state import STATE
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "file": __file__, "name": __name__, "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(), "active": bool(STATE.handles),
    "torch": "torch" in sys.modules, "cli": "veomni_hook.tools.cli" in sys.modules,
}))
"""


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


def test_a_console_script_becomes_the_process(veomni: Command, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n{REPORT}\nimport os; print(os.getppid()); sys.exit(3)")
    tool.chmod(0o755)
    done = veomni("run", "tool", "sft", "--help", cwd=Path("/"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    report, parent = done.out.splitlines()
    found = json.loads(report)
    assert (found["argv"], found["active"]) == ([str(tool), "sft", "--help"], True)
    assert (parent, done.status, done.err) == (str(os.getpid()), 3, "")


def test_python_in_a_shell_script_has_the_hook(tiny: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from transformers import TinyNorm; print(TinyNorm().forward(1))")
    (tmp_path / "train.sh").write_text(f"{sys.executable} -c 'import os; os._exit(4)'\necho $?\n")
    (tmp_path / "train.sh").open("a").write(f"{sys.executable} script.py && kill -TERM $$\n")
    done = tiny("run", "bash", "train.sh")
    assert (done.out, done.status, done.err) == ("4\n103\n", -15, "")


def test_python_is_run_with_what_it_is_given(tiny: Command, tmp_path: Path) -> None:
    code = "from transformers import TinyNorm; print(TinyNorm().forward(1), __debug__)"
    assert tiny("run", "python", "-O", "-c", code).out == "103 False\n"
    (tmp_path / "mod.py").write_text(code)
    assert tiny("run", "python3", "-m", "mod", flags=("-O",)).out == "103 False\n"


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
        "from veomni_hook.finders.settings_in_force import current_settings\n"
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
        "    value, pid = queue.get(timeout=600)\n"
        "    process.join()\n"
        "    print(value, pid != os.getpid(), process.exitcode, 'transformers' in sys.modules)\n"
    )
    done = tiny("run", "script.py")
    assert done.out == "103 True 0 False\n", done.err


TORCHRUN = """
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from veomni_hook.finders.already_imported import is_patched

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
line = f"rank {dist.get_rank()}: {total.item():.0f} {is_patched(modeling_qwen3)}"
lines = [None, None]
dist.all_gather_object(lines, line)
if dist.get_rank() == 0:
    print(lines)
dist.destroy_process_group()

sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8)
config = modeling_qwen3.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
model, ids = modeling_qwen3.Qwen3ForCausalLM(config), torch.zeros(1, 4, dtype=torch.long)
for _ in range(2):
    model(ids, labels=ids).loss.backward()
"""


@pytest.mark.slow
def test_torchrun_workers_run_patched_modules_and_rank_0_says_so(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TORCHRUN)
    launcher = ("torchrun", "--standalone", "--nproc_per_node", "2")
    done = veomni("run", *launcher, "script.py", OMP_NUM_THREADS="1", VEOMNI_BANNER=None)
    assert done.out == "['rank 0: 2 True', 'rank 1: 2 True']\n", done.err
    said = re.findall(r"veomni-hook: .*", done.err)
    assert len(said) == 1, done.err
    assert re.fullmatch(
        r"veomni-hook: qwen3 patched at 7 places \(.*\); details: veomni-hook explain qwen3", said[0]
    )
    assert sum(map(int, re.findall(r": (\d+)", said[0]))) == 7


@pytest.mark.slow
def test_accelerate_launches_workers_with_the_hook(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REPORT)
    done = veomni("run", "accelerate", "launch", "--cpu", "--num_processes", "1", "script.py", "--lr", "1")
    found = json.loads(done.out)
    assert (found["active"], found["argv"]) == (True, ["script.py", "--lr", "1"]), done.err


def test_flags_that_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_args_from_interpreter_flags", lambda: ["-O", "-I", "-P"])
    started_with_m = ModuleType("__main__")
    started_with_m.__spec__ = sys.modules[run_module.__name__].__spec__
    monkeypatch.setitem(sys.modules, "__main__", started_with_m)
    with pytest.raises(UsageError, match="-I"):
        interpreter_flags()
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # as a console script has it
    assert [flag for flag in interpreter_flags() if flag != "-u"] == ["-O"]

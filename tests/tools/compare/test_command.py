"""The command itself: real scripts in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import until
from tests.recipes import tiny
from veomni_hook.tools.cli.compare import _command
from veomni_hook.tools.cli.usage import UsageError
from veomni_hook.tools.compare import process

ROOT = Path(__file__).resolve().parents[3]

LOOP = """
import atexit, os, sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)

class Descent(torch.optim.Optimizer):  # torch's own import torch._dynamo here, which takes seconds
    def add_param_group(self, group):
        self.param_groups.append(group)

    def step(self):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

layer = torch.nn.Linear(8, 8)
optimizer = Descent(layer.parameters(), {})
run = sys.argv[1]
atexit.register(lambda: open(run, "a").write("at exit "))
hooked = "veomni_hook.install" in sys.modules
try:
    for step in range(100):
        layer(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    open(run, "a").write("to the end ")
finally:
    open(run, "a").write(f"{hooked} {step} ")
"""


def compare(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VEOMNI_", "PYTEST"))}
    folder.joinpath("cache").mkdir(mode=0o700, exist_ok=True)
    own = {"PYTHONPATH": str(ROOT), "VEOMNI_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "veomni_hook", "compare", *arguments], cwd=folder,
        env={**kept, **own, "HF_HUB_OFFLINE": "1", **variables}, capture_output=True, text=True, check=False,
        timeout=560,
    )  # fmt: skip


def found(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_script_is_run_by_turns_and_stopped(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = compare(
        tmp_path, "--steps", "3", "--rounds", "1", "--json", "-o", "page.html", "loop.py", "out-{run}"
    )
    assert done.returncode == 0, done.stderr
    report = found(done)
    assert [each["steps"] for each in report["runs"]] == [3, 3]
    assert all(each["stopped"] and each["status"] == 0 for each in report["runs"])
    assert report["loss"]["verdict"] == "agree" and report["loss"]["without_and_with"]["largest"] == 0.0
    assert len(report["curves"]["with"]) == 3 and report["with"]["median"] > 0
    assert report["with"]["time_to_first"] > 0
    # `finally` and atexit handlers ran, the third step did and one that is profiled, a fifth did not.
    assert (tmp_path / "out-without-1").read_text() == "False 3 at exit "
    assert (tmp_path / "out-with-1").read_text() == "True 3 at exit "
    assert "without the hook, run 1: 3 steps" in done.stderr
    assert any("tokens are unknown" in note for note in report["notes"])
    assert any("patched nothing" in note for note in report["notes"])
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_failure_with_the_hook_alone_is_reported(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, sys\nif os.environ['VEOMNI_HOOK'] == '1':\n    raise KeyError('only with the hook')\n"
    )
    done = compare(tmp_path, "fails.py")
    assert done.returncode == 1
    assert "with the hook, run 1: exit status 1, the last lines" in done.stdout
    assert "KeyError: 'only with the hook'" in done.stdout
    assert done.stdout.endswith("The script fails with the hook, and not without it.\n")
    assert "run 2" not in done.stderr


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_interruption_ends_the_script_and_what_it_started(tmp_path: Path, handler: Any) -> None:
    """Also in a job that a shell started in the background, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        _interrupted(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        # Closed by name: what a signal raises while a file closes itself is lost.
        f"with open({str(tmp_path / 'child')!r}, 'w') as file:\n    file.write(str(child.pid))\n"
        "time.sleep(60)\n"
    )

    def watch() -> bool:
        if (tmp_path / "child").exists() and (tmp_path / "child").read_text():
            raise KeyboardInterrupt
        return False

    with open(tmp_path / "log", "wb") as log, pytest.raises(KeyboardInterrupt):
        process.run(
            [sys.executable, str(script)], os.environ, cwd=tmp_path, output=log, watch=watch, limit=None
        )
    child = int((tmp_path / "child").read_text())
    until(lambda: not _runs(child))
    assert "KeyboardInterrupt" in (tmp_path / "log").read_text()


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    code = "import time; time.sleep(60)"
    ended = process.run(
        [sys.executable, "-c", code], os.environ, cwd=None, output=None, watch=lambda: False, limit=0.3
    )
    assert ended.status != 0 and "--timeout" in ended.ended_by_us


def test_nothing_to_run_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="no script"):
        _command([], None)
    with pytest.raises(UsageError, match="no-such-program"):
        _command(["no-such-program", "x"], None)
    assert _command(["x"], "package.module")[-3:] == ["-m", "package.module", "x"]
    assert _command(["python", "-c", "1"], None)[1:][-2:] == ["-c", "1"]


DISTRIBUTED = """
import torch, torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
config = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, **sizes)
model = DistributedDataParallel(Qwen3ForCausalLM(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
for step in range(1000):
    ids = torch.randint(0, 256, (2, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    launcher = ("torchrun", "--standalone", "--nproc_per_node", "2", "train.py")
    done = compare(tmp_path, "--steps", "4", "--rounds", "1", "--json", *launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    report = found(done)
    assert report["world"] == 2
    assert [each["steps"] for each in report["runs"]] == [4, 4]
    assert report["runs"][0]["tokens"][1:] == [128] * 3
    assert {row["op"] for row in report["kernels"]} >= {"rms_norm", "rotary"}
    assert report["loss"]["verdict"] == "agree"


@pytest.mark.slow
def test_the_demos_script(tmp_path: Path) -> None:
    script, model = ROOT / "examples" / "recipes" / "finetune.py", tiny.dense(tmp_path / "model")
    order = ("--steps", "5", "--rounds", "2", "--json", str(script), str(model), "--length", "128")
    done = compare(tmp_path, *order)
    assert done.returncode == 0, done.stdout + done.stderr
    report = found(done)
    assert report["models"] == ["Qwen3ForCausalLM"]
    assert report["loss"]["verdict"] == "agree" and report["loss"]["two_without"]["largest"] == 0.0
    assert report["runs"][0]["tokens"] == [128] * 5
    assert any(row["ran"] and row["backend"] != "eager" for row in report["kernels"])


@pytest.mark.parametrize(
    ("launcher", "last"),
    [
        ("", "ValueError: no model"),
        (
            "Traceback (most recent call last):\n  raise ChildFailedError(\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\ntrain.py FAILED\n",
            "ValueError: no model",
        ),
        (
            "Traceback (most recent call last):\nsubprocess.CalledProcessError: Command failed\n",
            "ValueError: no model",
        ),
        ("Traceback (most recent call last):\nKeyError: 'another'\n", "KeyError: 'another'"),
    ],
    ids=["none", "torchrun", "accelerate", "the script's own"],
)
def test_the_last_lines_are_those_of_the_script(tmp_path: Path, launcher: str, last: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"step 1\nTraceback (most recent call last):\n  train()\nValueError: no model\n{launcher}")
    assert process.tail(log, 15)[-1] == last
    assert process.tail(log, 1) == [last]

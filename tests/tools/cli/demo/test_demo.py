"""The demo: its verdict, what it says when it cannot run, and one real run from the command line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import typer

from veomni_hook.tools.cli.demo import command as demo
from veomni_hook.tools.cli.demo import models, plot
from veomni_hook.tools.cli.demo.processes import Worker, by_turns
from veomni_hook.tools.cli.demo.text import ratio, show
from veomni_hook.tools.cli.demo.worker import Steps
from veomni_hook.tools.cli.usage import WRONG_USE, UsageError, exit_status
from veomni_hook.tools.significance import compare

ROOT = Path(__file__).resolve().parents[4]
MEBIBYTE = 2**20
KERNELS = [["rms_norm", "torch"]]


def side(losses=(6.0, 5.0, 4.5, *[4.0] * 9), answer="Paris", peak=1200, kernels=(), seconds=()) -> dict:
    part = {
        "losses": list(losses), "answer": answer, "tokens": 192, "parameters": 134_515_008,
        "model_type": "llama", "step_seconds": list(seconds) or [0.1] * 10, "peak_bytes": peak * MEBIBYTE,
        "kernels": list(kernels),
    }  # fmt: skip
    machine = {
        "transformers": "5.23.0", "torch": "2.13.0", "device": "cpu", "device_name": "CPU", "threads": 2,
    }  # fmt: skip
    return {**machine, "parts": {part_name.value: part for part_name in demo.Way}}


def report(*, drift: bool = False, model: str = models.TRAINED, **hooked) -> dict:
    """A report as `demo.measure` returns it; with `drift` the machine becomes slower and slower."""
    seconds = [0.1 * 1.1**step * drift or 0.1 for step in range(10)]
    faster = [0.98 * taken for taken in seconds]
    changed = {"peak": 300, "kernels": KERNELS, "seconds": faster, **hooked}
    return demo.compared(model, side(seconds=seconds), side(**changed))


@pytest.mark.parametrize(
    ("plain", "hooked", "expected"),
    [
        ([2.0, 4.0], [2.0, 3.0], [0.0, 0.25]),
        ([2.0], [math.nan], [math.inf]),
        ([2.0, 1.0], [2.0], [0.0, math.inf]),
        ([2.0], [2.0, 1.0], [0.0, math.inf]),
    ],
)
def test_differences_count_whatever_is_not_equal(plain, hooked, expected):
    assert demo.differences(plain, hooked) == expected


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (report(), ""),
        (report(losses=[6.0, 5.0, 4.6, *[4.0] * 9]), "the losses differ"),
        (report(losses=[6.0, 5.0, math.nan, *[4.0] * 9]), "the losses differ"),
        (report(losses=[6.0, 5.0]), "the losses differ"),
        (report(answer="London"), "the answers differ"),
        (report(kernels=[]), "the hook patched nothing"),
        (
            demo.compared("m", side(kernels=KERNELS), side(kernels=KERNELS)),
            "the run without the hook is patched, too",
        ),
    ],
    ids=["equal", "another loss", "no number", "too short", "another answer", "no kernel", "hooked twice"],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_verdict_is_the_exit_status(monkeypatch, tmp_path, capfd, found, problem, as_json):
    monkeypatch.setattr(demo, "measure", lambda *_: found)
    monkeypatch.setattr(plot, "write_plot", lambda _, path: path.touch())
    if not problem:
        demo.demo(folder=tmp_path, as_json=as_json)
    else:
        with pytest.raises(typer.Exit) as raised:
            demo.demo(folder=tmp_path, as_json=as_json)
        assert raised.value.exit_code == 1
    out = capfd.readouterr().out
    if as_json:
        assert set(json.loads(out)["parts"]) == {"full", "lora", "packed"}
    else:
        assert ("NOT EQUAL" in out) is (problem == "the losses differ")
        assert ("The hook FAILED" in out) is bool(problem) and problem in out
    assert (tmp_path / "demo.png").exists()
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["threads"] == 2


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_text_says_what_the_machine_can_tell(capfd):
    show(report(drift=True), ROOT / "examples" / demo.SCRIPT)
    out = capfd.readouterr().out
    # The machine slowed down by a factor of 2 meanwhile.
    assert (
        "0.25 (all weights), 0.25 (LoRA), 0.25 (packed samples) time, ratio 0.98, no difference beyond 5%"
        in flat(out)
    )
    assert "1,200 MiB 300 MiB" in flat(out) and "134,515,008 trained weights" in flat(out)
    assert "rms_norm (torch)" in out and "veomni-hook diff llama" in out
    show(report(model=models.RANDOM), ROOT / "examples" / demo.SCRIPT)
    assert "random weights" in flat(capfd.readouterr().out)


@pytest.mark.parametrize(
    ("hooked", "said"),
    [
        ([0.7, 0.72, 0.71, 0.72, 0.73, 0.72, 0.9], "0.72, faster (95% interval 0.70 to 0.90, 7 pairs"),
        ([1.2, 1.2, 1.3, 1.2, 1.1, 1.2, 1.2], "1.20, slower (95% interval 1.10 to 1.30, 7 pairs"),
        ([0.8, 1.2, 1.3, 0.9, 1.1, 1.4, 1.0], "too noisy to tell a difference (95% interval 0.80 to 1.40"),
        ([0.7], "too few steps"),
    ],
)
def test_a_ratio_is_said_with_its_interval(hooked, said):
    assert said in ratio(asdict(compare([[1.0] * len(hooked)], [hooked])))


@pytest.mark.parametrize("names", [["full", "lora", "packed"], ["lora"]])
def test_the_plot_shows_the_parts_that_there_are(tmp_path, names):
    pytest.importorskip("matplotlib")
    found = report()
    found["parts"] = {name: found["parts"][name] for name in names}
    plot.write_plot(found, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_plot_library_every_result_is_there(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(demo, "measure", lambda *_: report())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    demo.demo(folder=tmp_path)
    said = capfd.readouterr()
    assert "Losses" in said.out and "peak memory" in said.out and "report.json" in said.out
    assert "demo.png" not in said.out
    assert "no plot" in said.err and "pip install 'veomni-hook[demo]'" in said.err
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["equal"] is True


def test_the_default_folder_is_no_link(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "measure", lambda *_: report())
    monkeypatch.setattr(plot, "write_plot", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "demo_output").symlink_to(home)
    with pytest.raises(UsageError) as raised:
        demo.demo()
    assert "is a symbolic link" in raised.value.what and "--output" in raised.value.fix
    assert list(home.iterdir()) == []
    demo.demo(folder=tmp_path / "demo_output")  # named by hand
    assert (home / "report.json").exists()


def test_without_peft_the_demo_says_what_to_do(monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "peft" else name)
    with pytest.raises(UsageError, match="the demo needs peft") as raised:
        demo.demo()
    assert "pip install 'veomni-hook[demo]'" in raised.value.fix
    assert exit_status(raised.value) == WRONG_USE


@pytest.mark.parametrize("layout", ["checkout", "wheel"])
def test_the_script_is_found_in_both_layouts(monkeypatch, tmp_path, layout):
    package = tmp_path / "veomni_hook"
    script = (tmp_path if layout == "checkout" else package) / "examples" / demo.SCRIPT
    for file in (package / "tools" / "cli" / "demo" / "command.py", script):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(demo, "__file__", str(package / "tools" / "cli" / "demo" / "command.py"))
    assert demo.training_script() == script


def test_a_missing_script_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(
        demo, "__file__", str(tmp_path / "veomni_hook" / "tools" / "cli" / "demo" / "command.py")
    )
    with pytest.raises(UsageError, match=r"examples/recipes/finetune\.py is missing"):
        demo.training_script()


# What a process of the demo does, without torch: it notes when each of its turns begins and ends.
TAKES_TURNS = """
import json, sys, time
output, name, steps, log = sys.argv[1:]
for step in range(int(steps)):
    with open(log, "a") as file:
        if step % 3:  # the first step of each part is not measured
            print(f"{name} begins", file=file, flush=True)
            time.sleep(0.01)
            print(f"{name} ends", file=file, flush=True)
    print("ready", flush=True)
    sys.stdin.readline()
print("the last words")
if name != "dumb":
    open(output, "w").write(json.dumps({"name": name}))
sys.exit(3 * (name == "fails"))
"""


def workers(stack: ExitStack, tmp_path: Path, *asked: tuple[str, int]) -> list[Worker]:
    script = tmp_path / "turns.py"
    script.write_text(TAKES_TURNS, encoding="utf-8")
    made = []
    for name, steps in asked:
        command = [sys.executable, str(script), "OUTPUT", name, str(steps), str(tmp_path / "log")]
        made.append(stack.enter_context(Worker(command, dict(os.environ), f"the training that is {name}")))
    return made


def test_two_trainings_take_turns_and_nothing_runs_beside_a_measured_step(tmp_path):
    told = []
    with ExitStack() as stack:
        pair = workers(stack, tmp_path, ("off", 6), ("on", 6))
        found = by_turns(pair, ["one", "two"], 3, told.append)
    assert found == [{"name": "off"}, {"name": "on"}]
    pair = ["off begins", "off ends", "on begins", "on ends"]
    assert (tmp_path / "log").read_text(encoding="utf-8").splitlines() == pair * 4
    assert [line.split(": ")[0] for line in told] == ["one"] * 3 + ["two"] * 3
    assert told[-1].endswith("step 3 of 3")


def test_a_training_that_ends_early_leaves_what_both_recorded(tmp_path):
    with ExitStack() as stack:
        found = by_turns(workers(stack, tmp_path, ("off", 2), ("on", 2)), ["one"], 5, str)
    assert found == [{"name": "off"}, {"name": "on"}]


@pytest.mark.parametrize(("name", "why"), [("fails", "exit status 3"), ("dumb", "exit status 0")])
def test_a_process_that_fails_shows_what_it_said(tmp_path, capfd, name, why):
    with ExitStack() as stack, pytest.raises(typer.Exit) as raised:
        by_turns(workers(stack, tmp_path, (name, 1)), ["one"], 1, str)
    assert raised.value.exit_code == 1
    said = capfd.readouterr().err
    assert "the last words" in said
    assert f"the training that is {name} failed ({why})" in said


def test_memory_is_that_of_the_second_step_and_the_first_two_are_not_timed():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    weight.grad = torch.zeros(1)
    waits = []
    steps = Steps("cpu", lambda: waits.append(weight.grad))
    for size in (64, 40, 8, 4):
        held = torch.zeros(size * MEBIBYTE, dtype=torch.uint8)
        weight.grad = torch.zeros_like(weight)
        del held
        steps(optimizer, (), {})
    assert steps.peak_bytes / MEBIBYTE == pytest.approx(40, abs=0.1)
    assert len(steps.seconds) == 2
    assert waits == [None] * 4  # the next step starts without gradients


def test_without_the_packages_the_weights_are_random_and_made_once(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "PACKAGE", "a_package_that_is_not_there")
    small = {"hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3}
    for name, value in small.items():
        monkeypatch.setitem(models._SHAPES, name, value)
    folder = models.folder_of(tmp_path)
    assert folder == tmp_path / models.RANDOM and list(tmp_path.iterdir()) == [folder]
    (folder / "mark").touch()
    assert (models.folder_of(tmp_path) / "mark").exists()
    work = "\n".join(
        (
            "import sys; from veomni_hook.tools.cli.demo import worker; worker._turn = lambda: None; worker.SHORT = 32",
            "ran = worker.run(*sys.argv[1:3], 3, 'lora')",
            "assert len(ran['losses']) == 3 and len(ran['step_seconds']) == 1, ran",
            "assert ran['peak_bytes'] > 0 and ['rms_norm', 'torch'] in map(list, ran['kernels']), ran",
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", work, str(ROOT / "examples" / demo.SCRIPT), str(folder)],
        env={**os.environ, "VEOMNI_KERNELS": "torch", "VEOMNI_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_progress_is_lines_where_there_is_no_terminal(capfd):
    from veomni_hook.tools.cli.demo.processes import progress

    with progress() as told:
        told("LoRA: step 2 of 8")
        assert capfd.readouterr().err == "LoRA: step 2 of 8\n"

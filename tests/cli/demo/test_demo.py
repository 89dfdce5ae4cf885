"""The demo: its verdict, what it says when it cannot run, and one real run from the command line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import typer

from veomni_hook.cli.demo import command as demo
from veomni_hook.cli.demo import plot, probe
from veomni_hook.cli.demo.processes import Worker, train_by_turns
from veomni_hook.cli.demo.text import ratio, show
from veomni_hook.cli.demo.turns import compare
from veomni_hook.cli.usage import WRONG_USE, UsageError, exit_status

ROOT = Path(__file__).resolve().parents[3]


def report(hooked: list[float] | None = None, sources: list[str] | None = None, drift: bool = False) -> dict:
    """A report as `demo.measure` returns it; with `drift` the machine becomes slower and slower."""
    plain = [6.0, 5.0, 4.5] + [4.0] * 9
    hooked = plain if hooked is None else hooked
    seconds = [0.1 * 1.1**step * drift or 0.1 for step in range(len(plain))]
    training = demo.trained(
        {"parameters": 4_000_000, "losses": plain, "step_seconds": seconds},
        {"losses": hooked, "step_seconds": [0.98 * each for each in seconds]},
    )
    patch = {"kind": "guard", "target": "A.forward", "reason": "why " * 30, "config": "c", "lines": (3, 4)}
    training["patches"] = {"applied": [patch], "stored": "cache/modeling_qwen3.py", "reason": "because"}
    training["patched_sources"] = ["demo/modeling_qwen3.py"] if sources is None else sources
    training["equal"] &= bool(training["patched_sources"])
    found = {
        "transformers": "5.23.0",
        "torch": "2.13.0",
        "device": "cpu",
        "device_name": "CPU",
        "threads": 2,
        "parts": [part.value for part in demo.Part],
        "training": training,
        "imports": {"unpatched": 0.008, "cold": 0.1, "warm": 0.009},
        "equal": training["equal"],
    }
    for part in ("vocabulary", "experts"):
        case = probe.CASES[part]
        step = {
            "loss": 11.9,
            "gradient_norm": 1.5,
            "peak_bytes": 1200 * 2**20,
            "step_seconds": [1.0, 1.1, 2.0],
        }
        found[part] = {
            "config": case.config | case.cpu[1],
            "tokens": case.cpu[0],
            "parameters": 19_000_000,
            "dtype": "float32",
            "tolerance": 1e-4,
            "experts_implementation": "grouped_mm",
            "kernels": ["Qwen3RMSNorm x3: rms_norm: eager (why)"],
            "plain": step,
            "hooked": {**step, "peak_bytes": 300 * 2**20},
        }
        demo.stepped(found[part])
    return found


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
    ("found", "status"),
    [
        (report(), None),
        (report(hooked=[6.0, 5.0, 4.6]), 1),
        (report(hooked=[6.0, 5.0, math.nan] + [4.0] * 9), 1),
        (report(sources=[]), 1),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_verdict_is_the_exit_status(monkeypatch, tmp_path, capfd, found, status, as_json):
    monkeypatch.setattr(demo, "measure", lambda *_: found)
    monkeypatch.setattr(plot, "write_plot", lambda _, path: path.touch())
    if status is None:
        demo.demo(steps=3, folder=tmp_path, as_json=as_json)
    else:
        with pytest.raises(typer.Exit) as raised:
            demo.demo(steps=3, folder=tmp_path, as_json=as_json)
        assert raised.value.exit_code == status
    out = capfd.readouterr().out
    if as_json:
        assert json.loads(out)["vocabulary"]["config"]["vocab_size"] == 151_936
    else:
        assert ("NOT EQUAL" in out) is (max(found["training"]["differences"]) > 1e-4)
        assert ("NOTHING: because" in out) is (not found["training"]["patched_sources"])
        assert ("The hook failed in: training" in flat(out)) is (status == 1)
        assert "1,200 MiB without, 300 MiB with the hook: 0.25 of the memory" in flat(out)
        assert "+92.0 ms" in out and "+1.0 ms" in out
        assert "Qwen3RMSNorm x3" in out
    assert (tmp_path / "demo.png").exists()
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["threads"] == 2


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_text_fits_80_columns_and_says_what_the_machine_can_tell(capfd):
    found = report(drift=True)
    show(found, ROOT / "examples" / "train.py")
    out = capfd.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "no difference beyond 5%: 0.98 of the time" in flat(
        out
    )  # the machine slowed down by a factor of 2
    assert "too few turns to tell a difference; measure more with --rounds 30" in flat(out)


@pytest.mark.parametrize(
    ("hooked", "said"),
    [
        ([0.7, 0.72, 0.71, 0.72, 0.73, 0.72, 0.9], "faster with the hook: 0.72 of the time"),
        ([1.2, 1.2, 1.3, 1.2, 1.1, 1.2, 1.2], "slower with the hook: 1.20 of the time"),
        (
            [0.8, 1.2, 1.3, 0.9, 1.1, 1.4, 1.0],
            "too noisy to tell a difference: the ratio may be anything from 0.80",
        ),
    ],
)
def test_a_ratio_is_said_with_its_interval(hooked, said):
    assert said in ratio(compare([1.0] * 7, hooked).to_dict(), "--steps 60")


def test_the_plot_shows_the_parts_that_there_are(tmp_path):
    pytest.importorskip("matplotlib")
    plot.write_plot(report(), tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert len(plot._panels(report())) == 7
    one = {"transformers": "5.23.0", "parts": ["imports"], "imports": report()["imports"]}
    assert len(plot._panels(one)) == 1


def test_without_a_plot_library_every_result_is_there(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(demo, "measure", lambda *_: report())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    demo.demo(steps=3, folder=tmp_path)
    said = capfd.readouterr()
    assert "losses" in said.out and "peak memory" in said.out and "report.json" in said.out
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
        demo.demo(steps=3)
    assert "is a symbolic link" in raised.value.what and "--output" in raised.value.fix
    assert list(home.iterdir()) == []
    demo.demo(steps=3, folder=tmp_path / "demo_output")  # named by hand
    assert (home / "report.json").exists()


def test_without_accelerate_the_training_says_what_to_do_and_the_rest_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.setattr(plot, "write_plot", lambda *_: None)
    with pytest.raises(UsageError) as raised:
        demo.demo()
    assert "pip install 'veomni-hook[demo]'" in raised.value.fix and "--part vocabulary" in raised.value.fix
    assert exit_status(raised.value) == WRONG_USE
    asked = []
    found = {"transformers": "5.23.0", "parts": ["imports"], "imports": report()["imports"], "equal": True}
    monkeypatch.setattr(demo, "measure", lambda script, folder, parts, options: asked.append(parts) or found)
    demo.demo(parts=[demo.Part.IMPORTS], folder=tmp_path)
    assert asked == [["imports"]]


@pytest.mark.parametrize("layout", ["checkout", "wheel"])
def test_the_script_is_found_in_both_layouts(monkeypatch, tmp_path, layout):
    package = tmp_path / "veomni_hook"
    script = (tmp_path if layout == "checkout" else package) / "examples" / "train.py"
    for file in (package / "cli" / "demo" / "command.py", script):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(demo, "__file__", str(package / "cli" / "demo" / "command.py"))
    assert demo.training_script() == script


def test_a_missing_script_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "veomni_hook" / "cli" / "demo" / "command.py"))
    with pytest.raises(UsageError, match=r"examples/train\.py is missing"):
        demo.training_script()


# What a process of the demo does, without torch: it notes when each of its turns begins and ends.
TAKES_TURNS = """
import json, sys, time
output, name, steps, log = sys.argv[1:]
for step in range(int(steps)):
    print("ready", flush=True)
    sys.stdin.readline()
    with open(log, "a") as file:
        print(f"{name} begins", file=file, flush=True)
        time.sleep(0.01)
        print(f"{name} ends", file=file, flush=True)
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
    for worker in made:
        assert worker.until("ready") == "ready"
    return made


def test_two_trainings_take_turns_and_nothing_runs_beside_a_step(tmp_path):
    told = []
    with ExitStack() as stack:
        found = train_by_turns(workers(stack, tmp_path, ("off", 3), ("on", 3)), 3, told.append)
    assert found == [{"name": "off"}, {"name": "on"}]
    pair = ["off begins", "off ends", "on begins", "on ends"]
    assert (tmp_path / "log").read_text(encoding="utf-8").splitlines() == pair * 3
    assert told[-1].endswith("step 3 of 3")


def test_a_training_that_ends_early_leaves_what_both_recorded(tmp_path):
    with ExitStack() as stack:
        found = train_by_turns(workers(stack, tmp_path, ("off", 2), ("on", 2)), 5, str)
    assert found == [{"name": "off"}, {"name": "on"}]


@pytest.mark.parametrize(("name", "why"), [("fails", "exit status 3"), ("dumb", "exit status 0")])
def test_a_process_that_fails_shows_what_it_said(tmp_path, capfd, name, why):
    with ExitStack() as stack, pytest.raises(typer.Exit) as raised:
        train_by_turns(workers(stack, tmp_path, (name, 1)), 1, str)
    assert raised.value.exit_code == 1
    said = capfd.readouterr().err
    assert "the last words" in said
    assert f"the training that is {name} failed ({why})" in said


@pytest.mark.slow
def test_the_demo_trains_twice_and_measures(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "veomni_hook",
            "demo",
            "--steps=4",
            "--rounds=1",
            "--output",
            str(tmp_path / "demo"),
            "--json",
        ],
        cwd=ROOT,
        env={**environment, "VEOMNI_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    training = found["training"]
    assert len(training["plain"]["losses"]) == len(training["hooked"]["losses"]) == 4
    for name in ("plain", "hooked"):
        losses = training[name]["losses"]
        assert losses[0] > losses[-1] + 0.5
    # The models without and with the hook are one computation.
    assert found["equal"] and found["vocabulary"]["equal"] and found["experts"]["equal"]
    # The fused loss holds far less than all logits.
    vocabulary = found["vocabulary"]
    assert vocabulary["hooked"]["peak_bytes"] < vocabulary["plain"]["peak_bytes"] / 2
    logits = vocabulary["tokens"] * vocabulary["config"]["vocab_size"] * 4
    assert vocabulary["plain"]["peak_bytes"] > logits > vocabulary["hooked"]["peak_bytes"]
    for part, op in (("vocabulary", "linear_cross_entropy"), ("experts", "moe_experts")):
        assert any(f" {op}/" in line and ": torch (" in line for line in found[part]["kernels"])
        assert len(found[part]["plain"]["step_seconds"]) == 1
    assert found["imports"]["cold"] > found["imports"]["unpatched"] > 0
    targets = {patch["target"] for patch in training["patches"]["applied"]}
    assert "Qwen3RMSNorm.forward" in targets
    assert Path(training["patches"]["stored"]).is_relative_to(tmp_path / "cache")
    assert any(path.endswith("modeling_qwen3.py") for path in training["patched_sources"])
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000

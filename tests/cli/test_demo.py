"""The demo: its verdict, what it says when it cannot run, and one real run from the command line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from veomni_hook.cli import demo
from veomni_hook.cli.usage import WRONG_USE, UsageError, exit_status

ROOT = Path(__file__).resolve().parents[2]


def report(hooked: list[float] | None = None, sources: list[str] | None = None) -> dict:
    """A report as `demo.measure` returns it."""
    plain = [6.0, 5.0, 4.5]
    hooked = plain if hooked is None else hooked
    differences = demo.differences(plain, hooked)
    step = {
        "loss": 11.9,
        "seconds": 1.0,
        "device": "cpu",
        "kernels": ["Qwen3RMSNorm x3: rms_norm: eager (why)"],
    }
    patch = {"kind": "guard", "target": "A.forward", "reason": "why", "config": "c:config", "lines": (3, 4)}
    return {
        "module": demo.MODULE,
        "transformers": "5.23.0",
        "device": "cpu",
        "plain": {"parameters": 4_000_000, "losses": plain, "step_seconds": [0.2, 0.1, 0.1]},
        "hooked": {"parameters": 4_000_000, "losses": hooked, "step_seconds": [0.2, 0.1, 0.05]},
        "differences": differences,
        "equal": max(differences) <= demo.TOLERANCE,
        "patches": {"applied": [patch], "stored": "cache/modeling_qwen3.py", "reason": ""},
        "patched_sources": ["demo/modeling_qwen3.py"] if sources is None else sources,
        "import_seconds": {"unpatched": 0.008, "cold": 0.1, "warm": 0.009},
        "vocabulary": 151_936,
        "tokens": 512,
        "eager": {**step, "peak_bytes": 1200 * 2**20},
        "chunked": {**step, "peak_bytes": 300 * 2**20},
    }


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


def test_the_median_leaves_the_first_steps_out():
    assert demo.median_step([9.0, 8.0, 7.0, 1.0, 2.0, 3.0]) == 2.0
    assert demo.median_step([9.0, 8.0]) == 8.0


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (report(), None),
        (report(hooked=[6.0, 5.0, 4.6]), 1),
        (report(hooked=[6.0, 5.0, math.nan]), 1),
        (report(sources=[]), 1),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_verdict_is_the_exit_status(monkeypatch, tmp_path, capfd, found, status, as_json):
    monkeypatch.setattr(demo, "measure", lambda *_: found)
    if status is None:
        demo.demo(steps=3, seed=0, folder=tmp_path, as_json=as_json)
    else:
        with pytest.raises(typer.Exit) as raised:
            demo.demo(steps=3, seed=0, folder=tmp_path, as_json=as_json)
        assert raised.value.exit_code == status
    out = capfd.readouterr().out
    if as_json:
        assert json.loads(out)["vocabulary"] == 151_936
    else:
        assert ("NOT EQUAL" in out) is (not found["equal"])
        assert ("nothing was patched" in out) is (not found["patched_sources"])
        assert "peak 1200 MiB eager, 300 MiB chunked (0.25x)" in out
        assert "+92.0 ms cold" in out
        assert "Qwen3RMSNorm x3" in out
        assert "+1.0 ms warm" in out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["tokens"] == 512


def test_the_default_folder_is_no_link(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "measure", lambda *_: report())
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "demo_output").symlink_to(home)
    with pytest.raises(UsageError) as raised:
        demo.demo(steps=3, seed=0)
    assert "is a symbolic link" in raised.value.what and "--output" in raised.value.fix
    assert list(home.iterdir()) == []
    demo.demo(steps=3, seed=0, folder=tmp_path / "demo_output")  # named by hand
    assert (home / "report.json").exists()


@pytest.mark.parametrize("missing", [("accelerate",), ("matplotlib",), ("accelerate", "matplotlib")])
def test_without_the_extra_it_says_what_to_install(monkeypatch, missing):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(UsageError) as raised:
        demo.demo()
    assert "pip install 'veomni-hook[demo]'" in raised.value.fix
    assert " and ".join(missing) in raised.value.what
    assert exit_status(raised.value) == WRONG_USE


@pytest.mark.parametrize("layout", ["checkout", "wheel"])
def test_the_script_is_found_in_both_layouts(monkeypatch, tmp_path, layout):
    package = tmp_path / "veomni_hook"
    script = (tmp_path if layout == "checkout" else package) / "examples" / "train.py"
    for file in (package / "cli" / "demo.py", script):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(demo, "__file__", str(package / "cli" / "demo.py"))
    assert demo.training_script() == script


def test_a_missing_script_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "veomni_hook" / "cli" / "demo.py"))
    with pytest.raises(UsageError, match=r"examples/train\.py is missing"):
        demo.training_script()


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "pass"])
def test_a_training_that_fails_shows_what_it_said(tmp_path, capfd, ending):
    script = tmp_path / "train.py"
    script.write_text(f"print('the last words')\n{ending}\n", encoding="utf-8")
    with pytest.raises(typer.Exit) as raised:
        demo.train([sys.executable, str(script)], dict(os.environ), 2, "with the hook")
    assert raised.value.exit_code == 1
    said = capfd.readouterr().err
    assert "the last words" in said
    assert "the training with the hook failed" in said


def test_a_measurement_that_fails_shows_what_it_said(monkeypatch, capfd):
    monkeypatch.setattr(demo.sys, "executable", "false")
    with demo.probe(dict(os.environ)) as measured, pytest.raises(typer.Exit):
        measured()
    assert "the measurement failed" in capfd.readouterr().err


def test_the_demo_trains_twice_and_measures(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "veomni_hook",
            "demo",
            "--steps",
            "4",
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
    assert len(found["plain"]["losses"]) == len(found["hooked"]["losses"]) == 4
    for name in ("plain", "hooked"):
        losses = found[name]["losses"]
        assert losses[0] > losses[-1] + 0.5
    # The two loss steps are one computation: the fused loss must agree, and hold far less than all logits.
    assert found["chunked"]["loss"] == pytest.approx(found["eager"]["loss"], rel=1e-5)
    assert found["chunked"]["peak_bytes"] < found["eager"]["peak_bytes"] / 2
    assert found["eager"]["kernels"] == []
    assert any("linear_cross_entropy" in line and ": torch (" in line for line in found["chunked"]["kernels"])
    assert found["eager"]["peak_bytes"] > found["tokens"] * found["vocabulary"] * 4
    targets = {patch["target"] for patch in found["patches"]["applied"]}
    assert "Qwen3RMSNorm.forward" in targets
    assert Path(found["patches"]["stored"]).is_relative_to(tmp_path / "cache")
    assert any(path.endswith("modeling_qwen3.py") for path in found["patched_sources"])
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000

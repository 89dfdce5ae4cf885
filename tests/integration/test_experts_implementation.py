"""A user's experts_implementation wins over auto, transformers' default does not; with real models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("facts_of_experts_implementation.py")

#: Two scripts with many models: half a minute.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VEOMNI_")}
    environment |= {
        "VEOMNI_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    running = {
        mode: subprocess.Popen(
            [sys.executable, str(SCRIPT), mode], env=environment, stdout=subprocess.PIPE, text=True
        )
        for mode in ("early", "late")
    }
    outputs = {mode: process.communicate(timeout=400)[0] for mode, process in running.items()}
    assert {mode: process.returncode for mode, process in running.items()} == {"early": 0, "late": 0}
    return {mode: json.loads(output.splitlines()[-1]) for mode, output in outputs.items()}


def test_the_default_is_there_and_no_choice(facts):
    models = facts["early"]["models"]
    assert models.pop("value") == "grouped_mm"
    assert models.pop("saved") is False
    chosen = {name for name, reason in models.items() if reason is not None}
    assert chosen == {name for name in models if name.startswith("explicit")}
    assert len(chosen) > 10


def test_a_choice_wins_over_auto_and_a_kernel_by_name_over_both(facts):
    assert facts["early"]["runs"] == {
        "auto, default": 1,
        "auto, explicit": 0,
        "auto, eager": 0,
        "moe_experts=tried, default": 1,
        "moe_experts=tried, explicit": 1,
        "moe_experts=tried, eager": 1,
        "eager, default": 0,
        "eager, explicit": 0,
        "eager, eager": 0,
        "compiled": 0,
    }


def test_a_late_hook_takes_no_default_for_granted(facts):
    assert "may have been chosen" in facts["late"]["models"]["default"]
    runs = facts["late"]["runs"]
    assert [runs[f"auto, {name}"] for name in ("default", "explicit", "eager")] == [0, 0, 0]
    assert runs["moe_experts=tried, default"] == 1

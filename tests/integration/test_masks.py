"""Compiled models get a mask only where they need one, with the hook as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import facts_of_masks

TOO_EARLY = "imported too early"
SCRIPT = Path(__file__).with_name("facts_of_masks.py")
#: The layers that need a mask whatever is known.
NEEDED = {"mistral, short window": [True, True], "gemma3_text, short window": [True, False]}

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
            [sys.executable, str(SCRIPT), mode],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mode in ("hook", "late")
    }
    plain = facts_of_masks.found("plain")
    outputs = {mode: process.communicate(timeout=600) for mode, process in running.items()}
    assert {mode: process.returncode for mode, process in running.items()} == dict.fromkeys(running, 0)
    return {
        "plain": plain,
        **{mode: json.loads(out.splitlines()[-1]) | {"told": told} for mode, (out, told) in outputs.items()},
    }


def test_attention_gets_a_mask_only_where_it_needs_one(facts):
    for name, model in facts["hook"]["alone"].items():
        assert model["masks"] == NEEDED.get(name, [False, False]), name
    # What the patch is for.
    assert facts["plain"]["alone"]["llama"]["masks"] == [True, True]


@pytest.mark.parametrize("case", ["packed", "padded"])
def test_what_only_values_can_tell_is_masked(facts, case):
    assert facts["hook"][case]["masks"] == facts["plain"][case]["masks"] == [True, True]


def test_compiled_models_compute_what_uncompiled_ones_do(facts):
    for mode, found in facts.items():
        inputs = {name: found[name] for name in ("packed", "padded") if name in found}
        assert inputs or mode == "late"
        for name, model in {**found["alone"], **inputs}.items():
            assert model["graphs"] == 1 and model["worst"] < 1e-5, (mode, name, model)


def test_every_model_has_the_patched_functions(facts):
    assert facts["hook"]["shared"] and TOO_EARLY not in facts["hook"]["told"]
    assert facts["hook"]["file"] != facts["plain"]["file"]


def test_masking_that_was_imported_too_early_is_named(facts):
    (warning,) = (line for line in facts["late"]["told"].splitlines() if TOO_EARLY in line)
    assert "compiled code without masks" in warning
    assert facts["late"]["file"] == facts["plain"]["file"]

"""Compiled models get a mask only where they need one, with the hook as users run it."""

import json
from pathlib import Path

import pytest

from tests.integration import facts_of_masks
from tests.processes import outputs, started

TOO_EARLY = "imported too early"
SCRIPT = Path(__file__).with_name("facts_of_masks.py")
#: The layers that need a mask whatever is known.
NEEDED = {"mistral, short window": [True, True], "gemma3_text, short window": [True, False]}

#: Two scripts with many models: half a minute.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    running = {mode: started(SCRIPT, mode, cache=cache) for mode in ("hook", "late")}
    found = {"plain": facts_of_masks.found("plain")}
    for mode, process in running.items():
        out, told = outputs(process)
        found[mode] = json.loads(out.splitlines()[-1]) | {"told": told}
    return found


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

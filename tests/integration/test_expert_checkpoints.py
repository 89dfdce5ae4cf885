"""Whole checkpoints load exactly in patched transformers, and experts that are missing are an error."""

import json
from pathlib import Path

import pytest

from tests.integration import facts_of_expert_checkpoints
from tests.processes import facts as facts_of
from tests.processes import started

SCRIPT = Path(__file__).with_name("facts_of_expert_checkpoints.py")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    running = started(SCRIPT, cache=tmp_path_factory.mktemp("cache"))
    plain = json.loads(json.dumps(facts_of_expert_checkpoints.facts()))
    return {"plain": plain, "patched": facts_of(running)}


def test_whole_checkpoints_load_and_are_saved_bit_by_bit(facts):
    families = facts["patched"]["families"]
    assert len(families) == 8
    assert {name: found for name, found in families.items() if found != ["exact", "exact"]} == {}


def test_damaged_checkpoints_are_errors_that_name_the_tensors(facts):
    module = "model.layers.1.mlp.experts"
    fused = ["CheckpointError", f"{module}.down_proj", f"{module}.gate_up_proj"]
    expert = ["CheckpointError", *(f"{module}.1.{role}_proj" for role in ("down", "gate", "up"))]
    damaged = {name: [found[0], *sorted(found[1:])] for name, found in facts["patched"]["damaged"].items()}
    assert damaged == {
        "a layer": fused,
        "an expert": expert,
        # A wrong shape is transformers' own error, unless it was told to ignore it.
        "the last expert": ["RuntimeError"],
        "the last expert, mismatches ignored": fused,
        "a projection": ["CheckpointError", f"{module}.1.up_proj"],
        "shifted": expert,
        "one too many": ["RuntimeError"],
        "a fused tensor": ["CheckpointError", "model.language_model.layers.1.mlp.experts.down_proj"],
        "experts in a dense layer": [each.replace("layers.1", "layers.0") for each in fused],
    }


def test_who_asks_for_the_list_gets_it_instead_of_an_error(facts):
    module = "model.layers.1.mlp.experts"
    layer = {"missing_keys": [f"{module}.down_proj", f"{module}.gate_up_proj"]}
    assert facts["patched"]["listed"] == {
        "whole": {},
        "a layer": layer,
        # transformers alone stacks the experts one place off, and its list is empty.
        "shifted": {"missing_keys": [f"{module}.1.{role}_proj" for role in ("down", "gate", "up")]},
    }
    assert facts["plain"]["listed"] == {"whole": {}, "a layer": layer, "shifted": {}}


def test_what_is_no_damage_loads(facts):
    other = dict(facts["patched"]["other"])
    gone = other.pop("the base model, a layer gone")
    assert gone[0] == "CheckpointError" and len(gone) == 3
    assert set(other.values()) == {"loaded"}


def test_the_damage_is_real(facts):
    """Alone, transformers loads some of them with a warning at most (all releases from 5.2 to 5.23)."""
    assert facts["plain"]["families"] == facts["patched"]["families"]
    assert "other weights" in facts["plain"]["damaged"].values()

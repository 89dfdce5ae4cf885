"""Families with towers: a patched training step computes what upstream's computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tests.multimodal.families import FAMILIES, batches
from tests.once import once

RELEASE = Version(transformers.__version__)
#: Whether linear attention takes boundaries.
PACKED = Version("5.9") <= RELEASE
LINEAR = ("qwen3_5", "qwen3_5_moe")

#: Largest difference relative to the largest value, for what is not zero but for rounding.
TOLERANCE, NOISE = 1e-4, 1e-10


@pytest.fixture
def steps(facts, family, tmp_path_factory):
    """What every step of a family computes, without the hook and with it, and the ops that kernels ran of."""
    folder = tmp_path_factory.mktemp("steps")

    def found() -> list[Any]:
        saved = str(folder / "saved")
        facts("facts_of_families", str(folder / "ours.pt"), saved, family, FACTS_HOOK="1", VEOMNI_STRICT="1")
        facts("facts_of_families", str(folder / "theirs.pt"), saved, family)
        return [torch.load(folder / name, weights_only=False) for name in ("theirs.pt", "ours.pt")]

    return once(tmp_path_factory, f"steps of {family}", found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_computes_the_same(steps, family):
    (theirs, *_), (ours, *_) = steps
    assert len(theirs) == 2 * len(batches(family))
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert ours[key].keys() == theirs[key].keys()
        for name, truth in theirs[key].items():
            worst = (ours[key][name].double() - truth.double()).abs().max().item()
            largest = truth.abs().max().item()
            assert worst <= max(TOLERANCE * largest, NOISE), (key, name, worst, largest)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_its_towers_runs_in_a_kernel(steps, family):
    assert "varlen_attention" in steps[1][1][family]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_equal_separate_ones(steps, family):
    """Upstream mixes them in linear attention; where it has no place for boundaries, the hook refuses."""
    theirs, ours = (each[2][family] for each in steps)
    if family in LINEAR:
        assert theirs[0] > 1e-3 * theirs[1]
        assert ours[0] <= 1e-6 * ours[1] if PACKED else ours == "SamplesError"
    else:
        assert theirs[0] <= 1e-6 * theirs[1] and ours[0] <= 1e-6 * ours[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_loaded_by_upstreams_code(steps, family):
    assert steps[0][3][family]

"""When the host of a GPU would wait in a training step: once without metadata, never with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from packaging.version import Version

from tests.multimodal.families import FAMILIES, batches
from tests.once import once

#: In transformers 5.2, towers compute sizes themselves, and take no metadata. Those of sounds make masks from
#: lengths; the text model of Qwen3.5 and the sizes of Qwen2.5-Omni's small model do not run there.
EARLY = Version(transformers.__version__) < Version("5.9")
RUN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v") if EARLY else tuple(FAMILIES)


@pytest.fixture(scope="module")
def waits(facts, tmp_path_factory) -> dict[str, Any]:
    def found() -> Any:
        return json.loads(facts("facts_of_waits", *RUN, FACTS_HOOK="1", VEOMNI_STRICT="1"))

    return once(tmp_path_factory, "waits", found)


@pytest.mark.parametrize("family", RUN)
def test_a_step_waits_once_at_most(waits, family):
    assert waits[family].keys() == batches(family).keys()
    for name, found in waits[family].items():
        plain = found["plain"]
        assert (plain["forward"], plain["backward"]) == (1, 0), (name, plain["where"])


@pytest.mark.parametrize("family", RUN)
def test_a_step_with_metadata_or_host_values_never_waits(waits, family):
    for name, found in waits[family].items():
        for way in ("metadata", "host_values"):
            assert found[way]["where"] == {}, (name, way)
            assert found[way]["loss"] == found["plain"]["loss"]


def test_without_the_hook_it_waits_many_times(facts):
    """The count could fail: it sees upstream's."""
    found = json.loads(facts("facts_of_waits", "qwen2_5_vl"))["qwen2_5_vl"]
    assert found["images"]["plain"]["forward"] > 30
    assert found["images"]["plain"]["backward"] > 0
    assert 1 < found["images"]["metadata"]["forward"]
    assert EARLY or found["images"]["metadata"]["forward"] < found["images"]["plain"]["forward"]


def test_a_tower_that_computes_sizes_itself_waits_once(facts):
    found = json.loads(facts("facts_of_towers"))
    assert sum(found["theirs"].values()) > 20
    assert list(found["ours"].values()) == [1]
    assert "host_copy" in next(iter(found["ours"]))
    assert found["same"] == [True] * 4

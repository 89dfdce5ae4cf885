"""When the host of a GPU would wait in a training step: once without metadata, never with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from packaging.version import Version

from tests.multimodal.families import FAMILIES, batches
from tests.once import once

#: In transformers 5.2, towers compute sizes themselves, and take no metadata. The text model of Qwen3.5 waits in
#: upstream's linear attention there.
RELEASE = Version(transformers.__version__)
EARLY = RELEASE < Version("5.9")
RUN = tuple(family for family in FAMILIES if not (EARLY and family.startswith("qwen3_5")))


@pytest.fixture
def waits(facts, family, tmp_path_factory):
    def found() -> Any:
        return json.loads(facts("facts_of_waits", family, FACTS_HOOK="1", VEOMNI_STRICT="1"))

    return once(tmp_path_factory, f"waits of {family}", found)[family]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", RUN)
def test_a_step_waits_once_at_most_and_never_with_metadata_or_host_values(waits, family):
    """Nor where towers are called for batches without data."""
    assert waits.keys() - {"packed"} == batches(family).keys()
    assert "packed" in waits
    assert "pixel_values" in waits["text"]["absent"]["called"]
    assert waits["images"]["absent"]["called"] != waits["text"]["absent"]["called"]
    for name, found in waits.items():
        plain = found["plain"]
        assert (plain["forward"], plain["backward"]) == (1, 0), (name, plain["where"])
        for way in ("metadata", "host_values", "absent"):
            assert found[way]["where"] == {}, (name, way)
            assert found[way]["loss"] == plain["loss"]


def test_without_the_hook_it_waits_many_times(facts):
    """The count could fail: it sees upstream's."""
    found = json.loads(facts("facts_of_waits", "qwen2_5_vl"))["qwen2_5_vl"]
    assert found["images"]["plain"]["forward"] > 30
    assert found["images"]["plain"]["backward"] > 0
    assert 1 < found["images"]["metadata"]["forward"]
    assert EARLY or found["images"]["metadata"]["forward"] < found["images"]["plain"]["forward"]


@pytest.mark.parametrize("hook", ["1", "0"])
def test_a_text_model_that_counts_its_positions_waits_for_nothing(facts, hook):
    known = hook == "1" and not EARLY  # transformers 5.2 counts them in other words
    for kind, found in json.loads(facts("facts_of_waits", "llama", "gemma3_text", FACTS_HOOK=hook)).items():
        asked = any("find_packed_sequence_indices" in where for where in found["where"])
        assert (found["forward"] == 0, asked) == (known, not known), (kind, found)
        assert found["backward"] == 0


@pytest.fixture(scope="module")
def towers(facts, tmp_path_factory):
    return once(tmp_path_factory, "towers", lambda: json.loads(facts("facts_of_towers")))


@pytest.mark.parametrize("kind", ["sizes", "lengths"])
def test_a_tower_that_computes_sizes_or_lengths_itself_waits_once(towers, kind):
    found = towers[kind]
    assert sum(found["theirs"].values()) > 20
    assert list(found["ours"].values()) == [1]
    assert "host_copy" in next(iter(found["ours"]))
    assert len(found["same"]) > 3 and all(found["same"])


@pytest.mark.slow
def test_sizes_of_images_that_may_be_anywhere_are_read_once(facts):
    """Mistral3, and LLaVA with Pixtral's tower, which cuts images by their sizes."""
    ours = json.loads(facts("facts_of_image_sizes", FACTS_HOOK="1", VEOMNI_STRICT="1"))
    upstream = json.loads(facts("facts_of_image_sizes"))
    if RELEASE < Version("5.23"):
        del ours["llava"]  # it had another form
    for family, found in ours.items():
        # Waits more are the text model's: whether samples share a row, and in early releases a second one.
        rest = (RELEASE < Version("5.9")) + (RELEASE < Version("5.17"))
        assert (found["tensor"]["forward"], found["list"]["forward"]) == (1 + rest, rest), found
        assert upstream[family]["tensor"]["forward"] > 5
        assert upstream[family]["list"]["forward"] > 2
        for kind, step in found.items():
            assert step["loss"] == pytest.approx(upstream[family][kind]["loss"], rel=1e-5)

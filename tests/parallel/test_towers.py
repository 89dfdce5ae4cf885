"""Towers of images, videos and sounds, whose layers several processes share."""

import pytest
import transformers
from packaging.version import Version

CLOSE = 1e-5
RELEASE = Version(transformers.__version__)
ASKED = pytest.mark.skipif(RELEASE < Version("5.9"), reason="the model asks its tower for no hidden states")
WHOLE = {"images": [136], "two images": [40], "image": [24], "text": [], "video": [24, 48]}


def check(ranks, family, kernels, *batches, world=2):
    """The rows of all processes, by batch, after a comparison with one process."""
    told = ranks.run(
        "facts_of_towers:facts", world, f"sp={world}", family=family, kernels=kernels, batches=batches
    )
    for found in told:
        assert found.keys() == set(batches)
        assert {name: fact for name, fact in found.items() if not fact["worst"] < CLOSE} == {}
        for name, fact in found.items():
            assert (fact["tower"] > 20) == (name != "text")
            assert name == "sounds" or fact["whole"] == WHOLE[name]
    return {name: [found[name]["rows"] for found in told] for name in batches}


@pytest.mark.skipif(RELEASE < Version("5.9"), reason="the text model cannot be split")
def test_images_frames_and_too_few_of_them(ranks):
    """An image is never cut, and one alone is computed by all; in windows as well."""
    rows = check(ranks, "qwen2_5_vl", "eager", *WHOLE)
    assert rows["images"] == [[24], [112]] and rows["two images"] == [[24], [16]]
    assert (
        rows["image"] == [[24], [24]] and rows["video"] == [[24, 32], [24, 16]] and rows["text"] == [[], []]
    )
    assert check(ranks, "qwen2_5_vl", "torch", "images") == {"images": rows["images"]}


def test_features_of_layers(ranks):
    rows = check(ranks, "qwen3_vl", "torch", "images", "image", "video")
    assert rows["images"] == [[24], [112]] and rows["video"] == [[24, 32], [24, 16]]


@pytest.mark.slow
def test_four_processes_with_fewer_images_and_sounds(ranks):
    """A process without an image runs the smallest one, whose result nobody sees."""
    rows = check(ranks, "qwen3_omni_moe", "eager", "images", "sounds", world=4)
    assert rows["images"] == [[24], [96], [16], [16]]
    assert rows["sounds"] == [[13, 16], [17, 16], [13, 16], [8, 16]]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "glm4v", "qwen3_5", "qwen3_vl_moe", "qwen2_5_omni"])
def test_other_families(ranks, family):
    rows = check(ranks, family, "torch", "images", *(["sounds"] if "omni" in family else []))
    assert rows["images"] == [[24], [112]]


@pytest.fixture(scope="module")
def told(ranks):
    checks = ["frozen", "partly_frozen", "recomputed", "hidden_states_of_layers", "a_layer_of_the_user"]
    checks += ["without_gradients", "other_images", "told"]
    return ranks.run("facts_of_towers:special", 2, "sp=2", checks=checks)


class TestSpecialCases:
    def test_frozen_towers(self, told):
        """A frozen tower is split as soon as the text model has created the group."""
        for found, own in zip(told, (24, 112), strict=True):
            first, second = found["frozen"]
            assert first["rows"] == [136] and second["rows"] == [own] == found["partly_frozen"]["rows"]
            assert max(each["worst"] for each in (first, second, found["partly_frozen"])) < CLOSE

    @pytest.mark.parametrize("reentrant", ["True", "False"])
    def test_recomputed_layers(self, told, reentrant):
        for found, own in zip(told, (24, 112), strict=True):
            assert found["recomputed"][reentrant]["worst"] < CLOSE
            assert set(found["recomputed"][reentrant]["rows"]) == {own}

    @pytest.mark.parametrize(
        "name", [pytest.param("hidden_states_of_layers", marks=ASKED), "a_layer_of_the_user"]
    )
    def test_layers_that_are_captured_or_replaced_are_not_split(self, told, name):
        for found in told:
            assert found[name]["rows"] == [136] and found[name]["worst"] < CLOSE

    def test_without_gradients_nothing_is_split(self, told):
        assert [each["without_gradients"] for each in told] == [[136], [136]]

    def test_what_is_said(self, told):
        for found in told:
            assert (
                "the 2 processes that share each sequence have other values of `pixel_values`"
                in found["other_images"]
            )
            line = "each of 2 processes runs the layers of Qwen3VLVisionModel on its share of the images"
            assert line in found["told"]
            replaced = "Qwen3VLVisionMLP (1.mlp) in its layers has a forward that is not upstream's"
            assert replaced in found["a_layer_of_the_user"]["explain"]


@pytest.mark.skipif(RELEASE < Version("5.17"), reason="the model is new in 5.17")
def test_arguments_that_are_read_behind_the_layers(ranks):
    found = ranks.run("facts_of_towers:special", 2, "sp=2", checks=["arguments_behind_the_layers"])
    for fact in (each["arguments_behind_the_layers"] for each in found):
        assert fact["whole"] == [136] and fact["tower"] > 20 and fact["worst"] < CLOSE
    assert [each["arguments_behind_the_layers"]["rows"] for each in found] == [[40], [96]]


@pytest.mark.slow
@pytest.mark.skipif(RELEASE < Version("5.9"), reason="the text model cannot be split")
def test_groups_with_other_numbers_of_images_and_sharded_parameters(ranks):
    found = ranks.run("facts_of_towers:special", 4, "sp=2", checks=["fully_sharded"])
    assert max(each["fully_sharded"] for each in found) < CLOSE

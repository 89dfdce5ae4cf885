"""Models that add features of images between their layers, with sequences that two processes share."""

import pytest

CLOSE = 1e-5


def check(ranks, family, kernels, *batches, checkpoint=False, compiled=False, world=2):
    told = ranks.run(
        "facts_of_deepstack:facts", world, f"sp={world}", family=family, kernels=kernels, batches=batches,
        checkpoint=checkpoint, compiled=compiled,
    )[0]  # fmt: skip
    assert told.keys() == set(batches)
    assert {name: fact for name, fact in told.items() if fact["worst"] > CLOSE} == {}
    for name, fact in told.items():
        assert fact["linked"] > 10
        assert name == "text" or fact["tower"] > 20


def test_rows_are_added_to_the_positions_of_each_process(ranks):
    check(ranks, "qwen3_vl", "eager", "images", "at the end", "at the beginning", "image and video")
    check(ranks, "qwen3_vl", "torch", "images", "text")


def test_checkpoints(ranks):
    check(ranks, "qwen3_vl", "eager", "images", checkpoint=True)


@pytest.mark.slow
def test_compiled_layers(ranks):
    check(ranks, "qwen3_vl", "eager", "images", "text", compiled=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_omni_moe"])
def test_other_families(ranks, family):
    check(ranks, family, "eager", "images", "at the end", "image and video")


@pytest.mark.slow
def test_four_processes(ranks):
    check(ranks, "qwen3_vl", "torch", "images", "at the end", "image and video", world=4)


def test_a_mask_of_some_positions_is_refused(ranks):
    for told in ranks.run("facts_of_deepstack:refused", 2, "sp=2"):
        assert "mask of the rows that are added between its layers is [1, 4], not [1, 8]" in told

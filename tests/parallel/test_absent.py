"""Ranks without images, videos or sounds call the towers as often as the others, and nothing else changes."""

import pytest

CLOSE = 1e-4


def assert_equal(told, *, same_calls=True):
    """Losses and gradients are those of upstream, and ranks call the towers equally often."""
    for each in told:
        assert each["loss"] < 1e-5
        assert each["gradients"] < CLOSE
        assert each["more"] == 0
        assert each["random"]
    if same_calls:
        assert told[0]["calls"] == told[1]["calls"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "arrangement", ["tower", "blocks", "tower and blocks", "root", "DDP", "frozen tower"]
)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_rank_without_images(ranks, family, arrangement):
    told = ranks.run("absent_cases:facts", 2, family=family, arrangement=arrangement, parts=["image", "text"])
    assert_equal(told)
    # DistributedDataParallel needs one call of a tower; where it is shared, images and videos count each.
    assert told[0]["calls"] == {"visual": 1 if arrangement == "DDP" else 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize("parts", [["image", "image"], ["image", "text"], ["text", "video"]])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_reentrant_checkpoint_allows_one_call(ranks, family, parts):
    told = ranks.run(
        "absent_cases:facts", 2, family=family, arrangement="DDP", parts=parts,
        checkpoints="layers, reentrant",
    )  # fmt: skip
    assert_equal(told)
    assert told[0]["calls"] == {"visual": 1}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "qwen2_5_omni"]
)
def test_a_rank_without_images_in_other_families(ranks, family):
    told = ranks.run(
        "absent_cases:facts", 2, family=family, arrangement="tower and blocks", parts=["image", "text"]
    )
    assert_equal(told)
    assert told[0]["calls"]["visual"] >= 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ["half, tower and blocks", "half, blocks"])
def test_half_precision(ranks, arrangement):
    told = ranks.run(
        "absent_cases:facts", 2, family="qwen3_vl", arrangement=arrangement, parts=["image", "text"]
    )
    for each in told:
        assert each["loss"] < 5e-2
        assert each["gradients"] < 0.1
        assert each["calls"] == {"visual": 2}


def test_an_image_against_a_video(ranks):
    assert_equal(
        ranks.run(
            "absent_cases:facts",
            2,
            family="qwen3_vl",
            arrangement="tower and blocks",
            parts=["video", "image"],
        )
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ["tower and blocks", "DDP"])
def test_a_choice_of_kernels_does_not_switch_it_off(ranks, arrangement):
    told = ranks.run(
        "absent_cases:facts", 2, family="qwen2_5_vl", arrangement=arrangement, parts=["image", "text"],
        kernels="eager",
    )  # fmt: skip
    assert_equal(told)
    assert told[0]["calls"] == {"visual": 1 if arrangement == "DDP" else 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ["tower and blocks", "root", "DDP"])
@pytest.mark.parametrize("parts", [["audio", "text"], ["audio", "image"]])
def test_sounds(ranks, parts, arrangement):
    told = ranks.run("absent_cases:facts", 2, family="qwen3_omni_moe", arrangement=arrangement, parts=parts)
    assert_equal(told)
    assert told[0]["calls"] == {"visual": 1 if arrangement == "DDP" else 2, "audio_tower": 1}


def test_images_of_any_size(ranks):
    for told in ranks.run("absent_cases:sized", 2, kernels="torch"):
        assert told["gradients"] < CLOSE


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpoints", ["layers", "whole", "whole, reentrant"])
@pytest.mark.parametrize("arrangement", ["tower and blocks", "DDP"])
def test_checkpoints(ranks, arrangement, checkpoints):
    told = ranks.run(
        "absent_cases:facts", 2, family="qwen3_vl", arrangement=arrangement, parts=["image", "text"],
        checkpoints=checkpoints,
    )  # fmt: skip
    # The first pass of a reentrant checkpoint has no gradients that DistributedDataParallel waits for.
    assert_equal(told, same_calls=(arrangement, checkpoints) != ("DDP", "whole, reentrant"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ["tower and blocks", "root"])
def test_upstreams_code_alone_does_not_end(ranks, arrangement):
    with pytest.raises(AssertionError, match=r"more than 12 s|rank \d"):
        ranks.run(
            "absent_cases:facts", 2, family="qwen3_vl", arrangement=arrangement, parts=["image", "text"],
            kernels="off", limit=12,
        )  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ["tower and blocks", "root", "DDP"])
def test_evaluation(ranks, arrangement):
    told = ranks.run("absent_cases:evaluated", 2, family="qwen3_vl", arrangement=arrangement)
    # Without gradients, DistributedDataParallel waits for nobody.
    calls = [1, 0] if arrangement == "DDP" else [2, 2]
    assert [each["calls"] for each in told] == calls
    assert max(each["logits"] for each in told) < CLOSE


@pytest.mark.slow
def test_evaluation_with_upstreams_code_alone_does_not_end(ranks):
    with pytest.raises(AssertionError, match=r"more than 12 s|rank \d"):
        ranks.run(
            "absent_cases:evaluated", 2, family="qwen3_vl", arrangement="tower", kernels="off", limit=12
        )


def test_unused_parameters_that_are_found_need_no_call(ranks):
    told = ranks.run(
        "absent_cases:facts", 2, family="qwen3_vl", arrangement="DDP, unused", parts=["image", "text"]
    )
    assert [each["calls"]["visual"] for each in told] == [1, 0]
    assert max(each["gradients"] for each in told) < CLOSE


def test_one_process_calls_nothing(ranks):
    (told,) = ranks.run("absent_cases:facts", 1, family="qwen3_vl", arrangement="tower", parts=["text"])
    assert told["calls"] == {"visual": 0}

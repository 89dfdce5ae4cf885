"""Ranks without images, videos or sounds call the towers as often as the others, and nothing else changes."""

from itertools import product

import pytest

CLOSE = 1e-4
TEXT_ALONE = ["image", "text"]


def step(ranks, family, arrangement, parts=TEXT_ALONE, **options):
    return ranks.run("absent_cases:facts", 2, family=family, arrangement=arrangement, parts=parts, **options)


BOTH = ("qwen3_vl", "qwen2_5_vl")
WRAPPED = ("tower and blocks", "DDP")
#: Families, arrangements and options of steps.
STEPS = [
    *product(BOTH, ("tower", "blocks", "tower and blocks", "root", "DDP", "frozen tower"), [{}]),
    # A reentrant checkpoint allows one call.
    *product(BOTH, ["DDP"], [
        {"parts": parts, "checkpoints": "layers, reentrant"}
        for parts in (["image", "image"], TEXT_ALONE, ["text", "video"])
    ]),
    *product(("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "qwen2_5_omni"), ["tower and blocks"], [{}]),
    ("qwen3_vl", "tower and blocks", {"parts": ["video", "image"]}),
    *product(["qwen2_5_vl"], WRAPPED, [{"kernels": "eager"}]),  # a choice of kernels does not switch it off
    *product(["qwen3_omni_moe"], (*WRAPPED, "root"), [{"parts": ["audio", other]} for other in ("text", "image")]),
    *product(["qwen3_vl"], WRAPPED, [{"checkpoints": each} for each in ("layers", "whole", "whole, reentrant")]),
]  # fmt: skip


@pytest.mark.sample(7)
@pytest.mark.parametrize(("family", "arrangement", "options"), STEPS)
def test_a_step_of_two_ranks_is_that_of_one_process(ranks, family, arrangement, options):
    """DistributedDataParallel needs one call of a tower; where it is shared, images and videos count each."""
    told = step(ranks, family, arrangement, **options)
    for each in told:
        assert each["loss"] < 1e-5 and each["gradients"] < CLOSE
        assert each["more"] == 0 and each["random"]
    calls = told[0]["calls"]
    # The first pass of a reentrant checkpoint has no gradients that DistributedDataParallel waits for.
    assert calls == told[1]["calls"] or (arrangement, options["checkpoints"]) == ("DDP", "whole, reentrant")
    if options.get("checkpoints") in (None, "layers, reentrant") and family in (*BOTH, "qwen3_omni_moe"):
        sounds = {"audio_tower": 1} if family == "qwen3_omni_moe" else {}
        assert calls == {"visual": 1 if arrangement == "DDP" else 2, **sounds}
    assert calls["visual"] >= 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ["half, tower and blocks", "half, blocks"])
def test_half_precision(ranks, arrangement):
    for each in step(ranks, "qwen3_vl", arrangement):
        assert each["loss"] < 5e-2 and each["gradients"] < 0.1
        assert each["calls"] == {"visual": 2}


def test_images_of_any_size(ranks):
    for told in ranks.run("absent_cases:sized", 2, kernels="torch"):
        assert told["gradients"] < CLOSE


@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ["tower and blocks", "root"])
def test_upstreams_code_alone_does_not_end(ranks, arrangement):
    with pytest.raises(AssertionError, match=r"more than 12 s|rank \d"):
        step(ranks, "qwen3_vl", arrangement, kernels="off", limit=12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ["tower and blocks", "root", "DDP"])
def test_evaluation(ranks, arrangement):
    told = ranks.run("absent_cases:evaluated", 2, family="qwen3_vl", arrangement=arrangement)
    # Without gradients, DistributedDataParallel waits for nobody.
    calls = [1, 0] if arrangement == "DDP" else [2, 2]
    assert [each["calls"] for each in told] == calls
    assert max(each["logits"] for each in told) < CLOSE


def test_unused_parameters_that_are_found_need_no_call(ranks):
    told = step(ranks, "qwen3_vl", "DDP, unused")
    assert [each["calls"]["visual"] for each in told] == [1, 0]
    assert max(each["gradients"] for each in told) < CLOSE


def test_one_process_calls_nothing(ranks):
    (told,) = ranks.run("absent_cases:facts", 1, family="qwen3_vl", arrangement="tower", parts=["text"])
    assert told["calls"] == {"visual": 0}

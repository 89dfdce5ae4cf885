"""Models whose experts are on several ranks, against one process."""

import pytest

from tests.parallel.ranks import DIVIDED

pytestmark = DIVIDED
CLOSE = 1e-5
CHECKPOINTINGS = ["", "plain", "reentrant"]


def check(crew, **arguments):
    for rank, answer in enumerate(crew.run("cases:steps", **arguments)):
        for kind in arguments.get("checkpointings", [""]):
            assert answer[kind]["loss"] < CLOSE, (rank, kind, answer)
            assert answer[kind]["gradient"] < CLOSE, (rank, kind, answer)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("size", "ep"),
    [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_loss_and_gradients_are_those_of_one_process(crew, family, size, ep):
    check(crew(size), family=family, ep=ep, checkpointings=CHECKPOINTINGS)


# A checkpoint computes again what runs without one, so both ways are tried of experts alone.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "checkpointing"),
    [
        ("experts", ""),
        *((what, "plain") for what in ("experts", "mlp.gate", "embed_tokens", "layers.0")),
        *(
            pytest.param(what, "", marks=pytest.mark.slow)
            for what in ("mlp.gate", "embed_tokens", "layers.0")
        ),
    ],
)
def test_frozen_parameters(two, what, checkpointing):
    for answer in two.run("cases:frozen", what=what, ep=2, checkpointing=checkpointing):
        assert answer["gradients"] > 5
        assert answer["far"] < CLOSE


def test_float8(two):
    for answer in two.run("cases:steps", family="Qwen3Moe", ep=2, experts="float8"):
        assert answer[""]["ran"] == ["float8"]
        assert answer[""]["loss"] < CLOSE
        # The rows of all ranks are cast together, not those of each batch: with powers of two, nearly the same.
        assert answer[""]["gradient"] < 1e-3


@pytest.mark.usefixtures("divided_by_transformers")
def test_transformers_own_dispatch_gives_the_same(two):
    check(two, family="Qwen3Moe", ep=2, implementation="all_to_all")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe", "qwen3_omni_moe", "deepseek_v4"])
def test_families_from_loading_to_saving(told, family):
    for answer in told.run("family_cases:steps", family=family):
        assert answer["saved"] == answer["divided again"] == 0.0
        assert max(answer[name] for name in ("norms", "loss", "gradients")) < 1e-4, answer
        assert answer["weights"] < 1e-3, answer  # Adam makes much of small gradients

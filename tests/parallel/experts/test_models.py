"""Models whose experts are on several ranks, against one process."""

from __future__ import annotations

import pytest

SIZES = [(2, 2), (4, 2), (4, 4)]
CLOSE = 1e-5


def steps(crew, **arguments):
    for rank, answer in enumerate(crew.run("step", **arguments)):
        assert answer["loss"] < CLOSE, (rank, answer)
        assert answer["gradient"] < CLOSE, (rank, answer)


@pytest.mark.parametrize("checkpointing", ["", "plain", "reentrant"])
@pytest.mark.parametrize(("world", "ep"), SIZES)
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_loss_and_gradients_are_those_of_one_process(request, family, world, ep, checkpointing):
    crew = request.getfixturevalue({2: "two", 4: "four"}[world])
    steps(crew, family=family, ep=ep, checkpointing=checkpointing)


@pytest.mark.parametrize("checkpointing", ["", "plain"])
@pytest.mark.parametrize("what", ["experts", "mlp.gate", "embed_tokens", "layers.0"])
def test_frozen_parameters(two, what, checkpointing):
    for answer in two.run("frozen", what=what, ep=2, checkpointing=checkpointing):
        assert answer["gradients"] > 5
        assert answer["far"] < CLOSE


def test_transformers_own_dispatch_gives_the_same(two):
    steps(two, family="Qwen3Moe", ep=2, implementation="all_to_all")

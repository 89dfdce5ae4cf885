"""Adapters of PEFT on models whose experts are divided."""

import pytest

from tests.parallel.ranks import DIVIDED

pytestmark = DIVIDED
CLOSE = 1e-5


def test_gradients_and_the_file_are_those_of_one_process(told):
    for answer in told.run("adapter_cases:gradients"):
        assert answer["loss"] < CLOSE and answer["gradients"] < CLOSE
        assert answer["file"] == 0 and answer["count"] == 8


def test_adapters_of_experts_are_an_error(told):
    for answer in told.run("adapter_cases:refusal"):
        assert "adapters of PEFT on experts (model.layers.0.mlp.experts of " in answer
        assert "VEOMNI_PARALLEL" in answer and "target_parameters" in answer


@pytest.mark.slow
def test_trainer_trains_and_resumes_them(told):
    """As with DDP, whose checkpoints are the same."""
    for answer in told.run("adapter_cases:with_trainer"):
        for name in ("theirs", "resumed", "on"):
            assert answer["ours"] == pytest.approx(answer[name], rel=CLOSE)

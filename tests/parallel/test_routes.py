"""Replayed routes where two processes share sequences, or experts."""

import pytest

from tests.parallel.ranks import DIVIDED


@pytest.mark.parametrize(
    "checkpointing",
    [pytest.param(False, id="alone", marks=pytest.mark.slow), pytest.param(True, id="checkpoints")],
)
def test_shared_sequences_get_the_positions_of_whole_routes(ranks, checkpointing):
    for found in ranks.run("facts_of_routes:shared_sequences", 2, "sp=2", checkpointing=checkpointing):
        assert found["loss"] < 1e-5 and found["gradients"] < 1e-4
        assert found["recorded"] and found["counted"]
        assert found["tokens"] == [14, 14] and found["entropy"] < 1e-5


@DIVIDED
@pytest.mark.parametrize("checkpointing", ["plain", pytest.param("reentrant", marks=pytest.mark.slow)])
def test_experts_on_two_processes_get_given_tokens(ranks, checkpointing):
    folder = ranks.folder / "routes"
    folder.mkdir(exist_ok=True)
    case = "experts.cases:replayed"
    for found in ranks.run(case, 2, "", folder=str(folder), ep=2, checkpointing=checkpointing):
        assert found["loss"] < 1e-5 and found["gradient"] < 1e-5
        assert found["tokens"] == [48, 48]

"""torch.compile of a model, in one graph, and of its layers, whose sequences two processes share."""

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "olmo_hybrid"])
@pytest.mark.parametrize("kind", ["model", "layers with checkpoints"])
def test_gradients_are_those_of_one_process(ranks, kind, family):
    assert ranks.run("facts_of_compiled:compared", 2, "sp=2", kind=kind, family=family)[0] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "layers with checkpoints"])
def test_keys_go_around_a_ring(ranks, kind):
    assert (
        ranks.run("facts_of_compiled:compared", 4, "sp=4", kind=kind, family="llama", sizes="sp=4")[0] < 1e-5
    )

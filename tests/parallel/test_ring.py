"""Attention whose keys go around a ring: exact for every mask, and the same work for all processes."""

import pytest

EXACT = 1e-12
#: Of float32.
CLOSE = 3e-6


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_outputs_and_gradients_are_those_of_one_process(ranks, world):
    # Copies at the end, halves of other lengths, a process that has copies only.
    for told in ranks.run("facts_of_ring:facts", world, f"sp={world}", lengths=[2 * world, 13, 16]):
        assert {case: far for case, far in told.items() if not far < EXACT} == {}
        assert len(told) == 9


def test_flash_attention_of_pairs(ranks):
    assert max(ranks.run("facts_of_ring:fused", 2, "sp=2")) < EXACT

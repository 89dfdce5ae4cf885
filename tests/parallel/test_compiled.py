"""torch.compile of a model, in one graph, and of its layers, whose sequences two processes share."""

from __future__ import annotations

import pytest

from tests.parallel.job import once


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "layers with checkpoints"])
def test_gradients_are_those_of_one_process(kind: str) -> None:
    told = once("facts_of_compiled.py", world=2)
    assert not isinstance(told, str), told
    assert told[0][kind] < 1e-5

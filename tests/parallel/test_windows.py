"""FSDP2: a process whose samples fill no window of positions trains with the others."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("transformers.models.deepseek_v4") is None, reason="the model is new in 5.9"
)
CASES = {
    "short": ([[12], [2]], "", False),
    "packed": ([[12], [1, 1]], "", False),
    "a unit of its own": ([[12], [1]], "compressor", False),
    "a unit of its own, with a cache": ([[12], [1]], "compressor", True),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_without_a_full_window_take_part(ranks, case):
    lengths, unit, use_cache = CASES[case]
    for told in ranks.run("window_cases:facts", 2, lengths=lengths, unit=unit, use_cache=use_cache):
        assert told["worst"] < 1e-5
        assert told["pooled"] == 8  # of two layers: two projections, the bias and the norm


def test_calls_for_each_sample_are_refused_where_processes_wait_for_each_call(ranks):
    with pytest.raises(AssertionError, match=r"SamplesError: samples share a row.*a unit of FSDP"):
        ranks.run("window_cases:facts", 2, lengths=[[12], [6, 6]], unit="compressor")

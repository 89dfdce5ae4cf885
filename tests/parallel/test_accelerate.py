"""accelerate's own data parallelism beside shared sequences: the losses and parameters of one process."""

import pytest


@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard_size": 4},
        pytest.param({"dp_replicate_size": 2, "dp_shard_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_shards_by_accelerate_trains_as_one_process(ranks, axes):
    (one,) = ranks.run("accelerate_cases:trained", 1, batch=4)
    told = ranks.run("accelerate_cases:trained", 4, "sp=2", batch=2, **axes)
    shares = [[rows[start : start + 8] for rows in one["read"]] for start in (0, 8)]
    assert [each["read"] for each in told] == [shares[0], shares[0], shares[1], shares[1]]
    for each in told:
        assert each["sizes"] == "sp=2"
        assert each["sharded"] == len(one["parameters"])
        assert each["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert each["norm"] == pytest.approx(one["norm"], rel=1e-6)
        for name, parameter in one["parameters"].items():
            assert each["parameters"][name] == pytest.approx(parameter, abs=1e-6), name

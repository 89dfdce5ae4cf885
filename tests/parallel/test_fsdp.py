"""The fused loss where FSDP2 has the head in a unit of its own, with others, tied, or in another precision.

And layers in float8 under FSDP2 and DDP.
"""

import pytest

EXACT = [
    "in the root", "alone", "with the norm", "with the norm, kept", "tied", "frozen head", "frozen layers",
    "checkpoints", "a rank without labels",
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arrangement", "close"), [*((each, 1e-5) for each in EXACT), ("float32 head", 2e-2)]
)
def test_it_trains_as_upstreams_loss_does(ranks, arrangement, close):
    for told in ranks.run("fsdp_cases:facts", 2, arrangement=arrangement):
        assert told["fused"]
        assert told["losses"] < close
        assert told["parameters"] < close


@pytest.mark.sample(1)
@pytest.mark.parametrize("arrangement", ["fsdp", "fsdp checkpoints", "ddp"])
def test_layers_in_float8_train_as_copies_do(ranks, arrangement):
    for told in ranks.run("fsdp_cases:in_float8", 2, arrangement=arrangement):
        assert told["ran"] == [""] * 14  # nothing was multiplied otherwise
        assert told["losses"] < 1e-5
        assert told["parameters"] < 1e-5

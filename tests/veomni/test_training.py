"""Twenty optimizer steps with VeOmni's configs of qwen3_moe and qwen3_vl: the losses of its generated modules."""

from __future__ import annotations

import pytest

from tests.veomni.conftest import in_process
from tests.veomni.inputs import STEPS

FAMILIES = ("qwen3_moe", "qwen3_vl")
CONFIGS = [(family, "gpu") for family in FAMILIES]

Losses = dict[str, list[float]]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The losses with VeOmni's generated modules, and without the hook."""
    cache = tmp_path_factory.mktemp("generated") / "cache"
    losses: Losses = in_process(cache, "train", "generated", "models", *FAMILIES, configs=[], HOOK="0")
    assert not cache.exists()
    for family in FAMILIES:
        assert len(losses[family]) == STEPS
        assert losses[family][-1] < 0.6 * losses[family][0]
    return losses


@pytest.mark.parametrize("first", ["models", "veomni"])
def test_losses_are_the_same_bits(generated, tmp_path, first):
    """With a cold cache and with a warm one, and in both orders of import."""
    for _ in ("cold", "warm"):
        given = in_process(
            tmp_path / "cache", "train", "hook", first, *FAMILIES, configs=CONFIGS, IDIOMS="0", DEVICE="gpu"
        )
        assert given == generated


def test_losses_agree_with_idioms(generated, tmp_path):
    given = in_process(
        tmp_path / "cache", "train", "hook", "models", *FAMILIES, configs=CONFIGS, KERNELS="torch",
        DEVICE="gpu",
    )  # fmt: skip
    for family in FAMILIES:
        assert given[family] == pytest.approx(generated[family], rel=1e-4)

"""The hook changes no number of what people do with models: `uses`, without and with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.processes import outputs, started
from tests.uses.uses import FAMILIES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Of sums over all values of a tensor.
TOLERANCE = 2e-3


def results(family: str, *options: str, **variables: str) -> dict[str, Any]:
    """What every use returns."""
    module = "tests.uses.uses"
    printed, _ = outputs(started("-m", module, family, "--device", DEVICE, *options, **variables))
    return dict(map(json.loads, printed.splitlines()))


def equal(one: Any, other: Any) -> bool:
    """Whether results are equal; of errors, whether they are of one kind."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= TOLERANCE * max(abs(one), abs(other), 1e-4)
    if isinstance(one, str) and isinstance(other, str):
        return one.partition(":")[0] == other.partition(":")[0]
    return bool(one == other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family == "qwen3_moe" else pytest.mark.slow) for family in FAMILIES],
)
def test_the_numbers_are_upstreams(family, tmp_path):
    expected = results(family)
    assert isinstance(expected["training"], list)
    hooked = results(
        family,
        "--hook",
        VEOMNI_KERNELS="auto" if DEVICE == "cuda" else "torch",
        VEOMNI_CACHE_DIR=str(tmp_path),
    )
    differing = {
        name: (expected[name], hooked[name]) for name in expected if not equal(expected[name], hooked[name])
    }
    assert not differing

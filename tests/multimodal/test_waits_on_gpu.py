"""When the host of a real GPU waits in a training step, as `torch.cuda.set_sync_debug_mode` tells it."""

import json

import pytest
import torch

from tests.multimodal.families import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def waits(facts_on_gpu):
    return json.loads(facts_on_gpu("facts_of_waits_on_gpu", FACTS_HOOK="1", VEOMNI_STRICT="1"))


@pytest.mark.parametrize("family", FAMILIES)
def test_once_at_most_and_never_with_metadata(waits, family):
    for name, found in waits[family].items():
        plain, known = found["plain"], found["metadata"]
        assert (len(plain["forward"]) <= 1, plain["backward"]) == (True, []), (name, plain)
        assert (known["forward"], known["backward"]) == ([], []), name
        assert known["loss"] == pytest.approx(plain["loss"], rel=1e-3)


def test_without_the_hook_it_waits_many_times(facts_on_gpu):
    """The count could fail: it sees upstream's."""
    found = json.loads(facts_on_gpu("facts_of_waits_on_gpu", "qwen2_5_vl"))["qwen2_5_vl"]
    assert len(found["images"]["plain"]["forward"]) > 10
    assert len(found["images"]["plain"]["backward"]) > 0

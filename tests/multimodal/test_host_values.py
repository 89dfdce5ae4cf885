"""What the setting `host_values` notes when a batch goes to a device, and that its specs reach both ways there."""

import pytest
import torch
from accelerate.utils import send_to_device
from transformers import BatchFeature

from tests.processes import outputs, started
from veomni_hook.kernels.shared.host_values import known_copy
from veomni_hook.multimodal import batches

SIZES = torch.tensor([[1, 4, 6]])


def made():
    return {
        "pixel_values": torch.randn(40, 50),
        "image_grid_thw": SIZES.clone(),
        "seconds": [torch.ones(2)],
        "mask": torch.ones(3, 4, dtype=torch.bool),
    }


@pytest.mark.parametrize("kind", [dict, BatchFeature])
def test_integers_and_few_floats_are_known(kind):
    batch = kind(made())
    given = batch["image_grid_thw"]
    found = batches.sent(send_to_device, batch, "meta")
    assert type(found) is kind and found["pixel_values"].device.type == "meta"
    assert known_copy(found["image_grid_thw"]).tolist() == SIZES.tolist()
    assert known_copy(found["mask"]).all() and known_copy(found["seconds"][0]).tolist() == [1, 1]
    # Later changes of the batch are not those of what was moved.
    given.zero_()
    assert known_copy(found["image_grid_thw"]).tolist() == SIZES.tolist()
    assert known_copy(found["pixel_values"]) is None


def test_what_stays_or_changes_its_shape_is_left_alone():
    assert batches.to(SIZES, device="cpu") is SIZES
    batch = [SIZES, torch.zeros(2, dtype=torch.long)]
    fewer = batches.sent(lambda given: [given[0].to("meta")], batch)
    other = batches.sent(lambda given: [each[:1].to("meta") for each in given], batch)
    assert [known_copy(each) for each in (*fewer, other[1])] == [None, None]
    assert known_copy(other[0]).tolist() == SIZES.tolist()


SCRIPT = """
import veomni_hook.install
import torch
from types import SimpleNamespace
from accelerate import data_loader
from transformers import Trainer
from veomni_hook.kernels.shared.host_values import _KNOWN

data = [{"sizes": torch.tensor([each, 2])} for each in range(4)]
loader = data_loader.DataLoaderShard(data, device="meta")
kept = [batch["sizes"] for batch in loader]
print([_KNOWN[id(each)].copy.tolist() if id(each) in _KNOWN else None for each in kept])
trainer = SimpleNamespace(args=SimpleNamespace(device="meta"), is_deepspeed_enabled=False)
moved = Trainer._prepare_input(trainer, data[3]["sizes"])
print(_KNOWN[id(moved)].copy.tolist() if id(moved) in _KNOWN else None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("on", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_accelerate_and_trainer(on, tmp_path):
    out, _ = outputs(started("-c", SCRIPT, cache=tmp_path, VEOMNI_HOST_VALUES=on, VEOMNI_STRICT="1"))
    known = [[[each, 2]] for each in range(4)], [3, 2]
    expected = known if on == "1" else ([None] * 4, None)
    assert out.splitlines() == [str(each) for each in expected]

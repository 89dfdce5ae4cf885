"""Checkpoints of real families, written by transformers in shards, through the converters and back: every bit."""

import pytest
import torch

from tests.checkpoints.small import (
    FAMILIES,
    Family,
    config_of,
    model_of,
    same,
    saved,
    stored,
    through,
    transposed,
    written_config,
)
from veomni_hook import checkpoints
from veomni_hook.checkpoints import CheckpointError

SINGLE = [name for name, family in FAMILIES.items() if family.layout == "per_expert"]


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def fill(model, tensors):
    """Load into a model that has other weights."""
    model.load_state_dict(tensors, strict=True)
    return model


def test_what_transformers_saved_is_loaded_and_written_back(family, tmp_path):
    model = model_of(family)
    on_disk = saved(model, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    single = any(".experts.0." in name for name in on_disk)
    assert single == (family.layout == "per_expert")

    config = written_config(tmp_path)
    loaded = through(checkpoints.from_any(config, **family.load), stored(tmp_path))
    assert same(loaded, model.state_dict())
    fresh = model_of(family)
    assert not same(fresh.state_dict(), model.state_dict())
    assert same(fill(fresh, loaded).state_dict(), model.state_dict())

    back = checkpoints.to_per_expert if single else checkpoints.to_fused
    assert same(through(back(config, **family.save), fresh.state_dict()), on_disk)


def test_every_layout_is_loaded_exactly_in_bfloat16(family, tmp_path):
    model = model_of(family).to(torch.bfloat16)
    own = model.state_dict()
    block = {"block": family.load["block"]} if family.load else {}
    written = {
        checkpoints.from_per_expert: through(checkpoints.to_per_expert(model.config, **family.save), own),
        checkpoints.from_fused: through(checkpoints.to_fused(model.config, **block), own),
        checkpoints.from_fused_transposed: through(
            checkpoints.to_fused_transposed(model.config, **block), own
        ),
    }
    assert same(written[checkpoints.from_fused_transposed], transposed(written[checkpoints.from_fused]))
    for factory, on_disk in written.items():
        for each in (factory, checkpoints.from_any):
            assert same(through(each(model.config, **family.load), on_disk), own)
        # A checkpoint that was saved again, in the layout in memory, passes untouched.
        again = through(factory(model.config, **family.load), own)
        assert all(again[name] is own[name] for name in own)


def test_the_model_is_filled_in_place(family, tmp_path):
    model = model_of(family)
    saved(model, tmp_path)
    fresh = model_of(family)
    parameters = dict(fresh.named_parameters())
    converter = checkpoints.from_any(written_config(tmp_path), into=parameters, **family.load)
    loaded = through(converter, stored(tmp_path))
    fused = [name for name in parameters if ".experts." in name]
    assert len(fused) == 2 * len(family.sparse)
    assert all(loaded[name] is parameters[name] for name in fused)
    assert all(torch.equal(parameters[name], model.get_parameter(name)) for name in fused)


def test_a_model_on_the_meta_device_says_what_to_expect(family, tmp_path):
    on_disk = saved(model_of(family), tmp_path)
    with torch.device("meta"):
        names = set(model_of(family, num_hidden_layers=3).state_dict())
    converter = checkpoints.from_any(written_config(tmp_path), expected=names, **family.load)
    with pytest.raises(CheckpointError, match="are missing") as caught:
        through(converter, on_disk)
    assert len(caught.value.tensors) == 2
    assert all("layers.2.mlp.experts." in name for name in caught.value.tensors)


@pytest.mark.parametrize("name", SINGLE)
def test_one_missing_projection_of_one_expert(name, tmp_path):
    family = FAMILIES[name]
    on_disk = saved(model_of(family), tmp_path)
    gone = next(key for key in on_disk if f"layers.{family.sparse[-1]}." in key and ".experts.2." in key)
    del on_disk[gone]
    with pytest.raises(CheckpointError) as caught:
        through(checkpoints.from_any(written_config(tmp_path), **family.load), on_disk)
    assert caught.value.tensors == (gone,)
    text, (module, _, rest) = str(caught.value), gone.partition(".2.")
    assert f"{module}: {rest.removesuffix('.weight')} of expert 2" in text


@pytest.mark.parametrize("name", SINGLE)
def test_one_expert_too_many(name, tmp_path):
    family = FAMILIES[name]
    on_disk = saved(model_of(family), tmp_path)
    like = next(key for key in on_disk if ".experts.3." in key)
    extra = like.replace(".experts.3.", ".experts.4.")
    converter = checkpoints.from_any(written_config(tmp_path), **family.load)
    with pytest.raises(CheckpointError, match=r"is of expert 4, and the model has 4 \(0 to 3\)") as caught:
        through(converter, {extra: on_disk[like]} | on_disk)
    assert caught.value.tensors == (extra,)


def test_models_with_another_layout_in_memory_are_refused():
    oss = Family("GptOss", dict(FAMILIES["mixtral"].config))
    with pytest.raises(CheckpointError, match="interleaved, and biases"):
        checkpoints.from_fused_transposed(config_of(oss))
    state = {n: t for n, t in model_of(oss).state_dict().items() if "experts" in n}
    converter = checkpoints.from_fused_transposed(checkpoints.ExpertSizes(4, 16, 12))
    biased = next(name for name in state if name.endswith("_bias"))
    with pytest.raises(CheckpointError, match="biases, scales and packed weights need a loader of their own"):
        converter.convert(biased, state[biased])

"""Positions and metadata that a collator adds: equal to what the model computes, in any worker."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils.data import DataLoader

from tests.multimodal import families
from tests.multimodal.families import BATCHES, FAMILIES, SPEECH, accepted, batch, batches, model
from veomni_hook.errors import MultimodalError, VeomniHookWarning
from veomni_hook.kernels.shared.host_values import known_copy
from veomni_hook.multimodal import collate_metadata, metadata, position_ids
from veomni_hook.multimodal.batches import Carried, carried

RELEASE = Version(transformers.__version__)
TAKEN = pytest.mark.skipif(RELEASE < Version("5.9"), reason="towers of this release take no metadata")
#: How releases call what interpolates the embeddings of places.
INTERPOLATION = "bilinear" if RELEASE < Version("5.17") else "interp"


def given(made, inputs):
    """What the model takes of a batch: what its forward names, and the metadata."""
    named = accepted(made, inputs)
    return {**named, **{name: each for name, each in inputs.items() if name.startswith(("image_", "video_"))}}


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_with_metadata_has_the_same_bits(family):
    made = model(family)
    add = pickle.loads(pickle.dumps(collate_metadata(made.config)))
    for name, samples in batches(family).items():
        results = []
        for inputs in (batch(family, samples), add(batch(family, samples))):
            made.zero_grad()
            loss = made(**given(made, inputs)).loss
            loss.backward()
            results.append([loss, *(each.grad for each in made.parameters() if each.grad is not None)])
        assert len(results[0]) == len(results[1])
        assert all(map(torch.equal, *results)), name


@TAKEN
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_metadata_is_what_the_tower_takes(family):
    made = model(family)
    found = collate_metadata(made.config)(batch(family, BATCHES["both"]))
    named = {name for name in found if name.startswith(("image_", "video_"))} - {
        "image_grid_thw",
        "video_grid_thw",
    }
    own = {
        "qwen2_5_vl": {"window_index", "cu_window_seqlens"},
        "qwen3_vl": {f"{INTERPOLATION}_indices", f"{INTERPOLATION}_weights"},
    }[family]
    expected = {"position_ids", "cu_seqlens"} | own
    assert named == {f"{modality}_{name}" for modality in ("image", "video") for name in expected}
    assert found["image_cu_seqlens"].tolist() == [0, 16]
    assert found["position_ids"].shape == (3, 1, found["input_ids"].shape[1])


@TAKEN
def test_what_the_tower_takes_otherwise_is_left_to_it():
    """Sizes of a second kind are arguments of the tower: what needs them is no step."""
    from transformers import VideoLlama3Config

    derived = type("MyConfig", (VideoLlama3Config,), {"__module__": __name__})
    add = collate_metadata(VideoLlama3Config())
    (step,) = add.steps
    assert step.results[0] == "cu_seqlens" and collate_metadata(derived()).steps == add.steps
    found = add({"image_grid_thw": torch.tensor([[1, 4, 6]])})
    assert found["image_cu_seqlens"].tolist() == [0, 24]


def test_what_a_batch_has_already_stays():
    made = model("qwen2_5_vl")
    inputs = batch("qwen2_5_vl", BATCHES["images"])
    own = torch.zeros(3, *inputs["input_ids"].shape, dtype=torch.long)
    bounds = torch.tensor([0, 24, 56, 92], dtype=torch.int32)
    found = collate_metadata(made.config)({**inputs, "position_ids": own, "image_cu_seqlens": bounds})
    assert found["position_ids"].data_ptr() == own.data_ptr()
    assert found["image_cu_seqlens"] is bounds


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_that_the_model_computes(family):
    """And None where it leaves them to its text model: without a mask, or for text alone."""
    made = model(family)
    text_model = getattr(made.model, "language_model", made.model)
    compute = pickle.loads(pickle.dumps(position_ids(made.config)))
    cases = {name: batch(family, samples, side="left") for name, samples in batches(family).items()}
    cases["no mask"] = {**cases["images"], "attention_mask": None}
    calls: list[Any] = []
    text_model.register_forward_pre_hook(
        lambda _, given, named: calls.append(named["position_ids"]), with_kwargs=True
    )
    for name, inputs in cases.items():
        # The model remembers how far the positions of the last call went.
        made.rope_deltas = made.model.rope_deltas = None
        made(**accepted(made, inputs))
        expected, found = calls.pop(), compute(inputs)
        assert (found is None) == (expected is None), name
        assert found is None or torch.equal(found, expected), name


def test_text_alone_gets_no_positions_that_the_model_would_not_compute():
    made = model("qwen2_5_vl")
    assert position_ids(made.config)(batch("qwen2_5_vl", BATCHES["text"])) is None
    assert "position_ids" not in collate_metadata(made.config)(batch("qwen2_5_vl", BATCHES["text"]))


@pytest.mark.parametrize("family", SPEECH)
def test_the_configuration_of_the_whole_or_of_the_thinker(family):
    from types import SimpleNamespace

    made = model(family)
    whole = SimpleNamespace(thinker_config=made.config)
    inputs = batch(family, BATCHES["images"])
    assert torch.equal(position_ids(whole)(inputs), position_ids(made.config)(inputs))


@pytest.mark.filterwarnings("ignore::veomni_hook.errors.VeomniHookWarning")
def test_a_model_without_such_positions_says_so():
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    with pytest.raises(MultimodalError, match="LlamaConfig has a method compute_3d_position_ids") as caught:
        position_ids(config)
    assert "positions=False" in caught.value.fix
    with pytest.raises(MultimodalError):
        collate_metadata(config, positions=True)
    inputs = {"input_ids": torch.ones(1, 3), "attention_mask": torch.ones(1, 3)}
    assert collate_metadata(config)(dict(inputs)).keys() == inputs.keys()


@TAKEN
def test_where_nothing_is_added_a_warning_says_so_once():
    from transformers import LlamaConfig

    class Own(LlamaConfig):
        """A class that no other test gives."""

    with pytest.warns(
        VeomniHookWarning, match="nor metadata of a tower for Own: no model in .*llama"
    ) as said:
        collate_metadata(Own())
        collate_metadata(Own())
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collate_metadata(type("Other", (LlamaConfig,), {})(), positions=False)
        collate_metadata(model("qwen2_5_vl").config)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_omni_moe"])
def test_a_configuration_that_a_user_derives_has_the_same_metadata(family):
    """Its class is in another module, as in a script, with a model of the user's beside it."""
    made = model(family)
    own = ModuleType("script_of_a_user")
    own.Model = type("Model", (type(made),), {"__module__": own.__name__})
    kind = type("MyConfig", (type(made.config),), {"__module__": own.__name__})
    with pytest.MonkeyPatch.context() as changed:
        changed.setitem(sys.modules, own.__name__, own)
        found = collate_metadata(kind(**made.config.to_dict()))(batch(family, BATCHES["both"]))
    expected = collate_metadata(made.config)(batch(family, BATCHES["both"]))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_no_images_have_no_metadata(family):
    made = model(family)
    none = {"image_grid_thw": torch.zeros(0, 3, dtype=torch.long)}
    inputs = batch(family, BATCHES["text"])
    found = collate_metadata(made.config)({**inputs, **none})
    assert found.keys() <= {*inputs, *none, "position_ids"}
    assert found["image_grid_thw"].shape == (0, 3)


def video_with_sound(family):
    """A batch with a video whose sound is between its tokens."""
    inputs = batch(family, [[("text", 3), ("video", (2, 4, 4)), ("audio", 90), ("text", 2)]])
    (ids,) = inputs["input_ids"].tolist()
    seen, heard = ([each for each in ids if each == token] for token in (families.VIDEO, families.AUDIO))
    begin, end = (families.VISION_START, families.AUDIO_START), (families.AUDIO_END, families.VISION_END)
    ids = [*ids[:3], *begin, *seen, *heard, *end, *ids[-2:]]
    return {**inputs, "input_ids": torch.tensor([ids])}


@pytest.mark.parametrize("family", SPEECH)
def test_sounds_of_videos_are_said_before_positions_are_computed(family):
    made = model(family)
    inputs = video_with_sound(family)
    said = collate_metadata(made.config)({**inputs, "use_audio_in_video": True})
    given = collate_metadata(made.config, use_audio_in_video=True)(dict(inputs))
    assert given["use_audio_in_video"] is True
    assert torch.equal(given["position_ids"], said["position_ids"])
    apart = pickle.loads(pickle.dumps(collate_metadata(made.config, use_audio_in_video=False)))(dict(inputs))
    assert not torch.equal(given["position_ids"], apart["position_ids"])
    metadata._said.discard("use_audio_in_video")
    with pytest.warns(VeomniHookWarning, match="as for use_audio_in_video=False") as warned:
        for _ in range(2):
            found = collate_metadata(made.config)(dict(inputs))
    assert len(warned) == 1
    assert torch.equal(found["position_ids"], apart["position_ids"])


def test_generation_takes_what_the_model_names():
    """As docs/multimodal.md says: `generate` refuses metadata, and positions may stay."""
    made = model("qwen2_5_vl").eval()
    inputs = {name: each for name, each in batch("qwen2_5_vl", BATCHES["both"]).items() if name != "labels"}
    found = collate_metadata(made.config)(dict(inputs))
    options = {"max_new_tokens": 3, "do_sample": False}
    expected = made.generate(**accepted(made, inputs), **options)
    assert torch.equal(made.generate(**accepted(made, found), **options), expected)


def collate(samples):
    """A batch by family and name, as a collator makes it of samples."""
    ((family, name),) = samples
    return batch(family, batches(family)[name])


class OfFamilies:
    """The collators of several families."""

    def __init__(self) -> None:
        self.each = {family: collate_metadata(model(family).config, collate) for family in FAMILIES}

    def __call__(self, samples: list[tuple[str, str]]) -> dict[str, Any]:
        return self.each[samples[0][0]](samples)


@pytest.mark.slow
def test_workers_that_are_spawned_compute_it():
    samples = [("qwen2_5_vl", name) for name in BATCHES] + [(family, "images") for family in FAMILIES]
    samples += [(family, "audio and images") for family in SPEECH]
    add = OfFamilies()
    loader = DataLoader(samples, collate_fn=add, num_workers=1, multiprocessing_context="spawn")
    for sample, found in zip(samples, loader, strict=True):
        expected = add([sample])
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert torch.equal(found[name], each), (sample, name)
            assert type(found[name]) is type(each), (sample, name)


def test_a_tensor_that_was_moved_has_known_values():
    tensor = carried(torch.tensor([[1, 4, 6], [2, 4, 4]]))
    assert type(tensor) is Carried
    for moved in (
        tensor.to("meta"),
        tensor.to(device="meta", non_blocking=True),
        tensor.to("meta", torch.int32),
    ):
        assert type(moved) is torch.Tensor
        assert known_copy(moved).tolist() == [[1, 4, 6], [2, 4, 4]]
        assert known_copy(moved).dtype is moved.dtype
    assert type(tensor.to("cpu")) is Carried
    for other in (tensor + 1, tensor[0], tensor.clone(), tensor.float(), tensor.to(torch.float32)):
        assert type(other) is torch.Tensor
    moved = tensor.to("meta")
    tensor.zero_()
    assert known_copy(moved).tolist() == [[1, 4, 6], [2, 4, 4]]
    assert type(pickle.loads(pickle.dumps(tensor))) is Carried


def test_a_copy_has_known_values_too():
    tensor = collate_metadata(model("qwen2_5_vl").config)(batch("qwen2_5_vl", BATCHES["text"]))[
        "attention_mask"
    ]
    one, other = copy.deepcopy([tensor, tensor])
    assert one is other and type(one) is Carried
    assert torch.equal(one, tensor) and one.data_ptr() != tensor.data_ptr()
    assert known_copy(one.to("meta")).tolist() == tensor.tolist()
    assert type(copy.copy(tensor)) is Carried

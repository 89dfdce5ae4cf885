"""What `plus_zero` leaves as it was, and what it says, with towers that pretend to be shared."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from veomni_hook.errors import ParallelError, VeomniHookWarning
from veomni_hook.multimodal import absent
from veomni_hook.multimodal.placeholders import placeholders


class Model(nn.Module):
    """A model with a tower that drops out, normalises, and may return anything."""

    def __init__(self, scale: float = 1.0, **config: Any) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.tower.config = SimpleNamespace(**config)
        self.unused = nn.Parameter(torch.ones(()))
        self.scale, self.calls = scale, 0

    def features(self, pixels: torch.Tensor) -> Any:
        self.calls += 1
        found = self.tower(pixels)
        return SimpleNamespace(
            pooler_output=(found * self.scale,),
            deepstack_features=[found[0], [found]],
            last_hidden_state=found * self.unused,
        )

    def run(self, embeds: torch.Tensor, **changes: Any) -> torch.Tensor:
        told = {
            "data": ("pixel_values",),
            "towers": ("tower", "config"),
            "outputs": ("pooler_output", "deepstack_features"),
        }
        return absent.plus_zero(self, embeds, lambda pixels: self.features(pixels), **{**told, **changes})


class Sized(nn.Conv2d):
    """A tower for images of any size, as an argument says."""

    def __init__(self) -> None:
        super().__init__(3, 4, 4)

    def forward(self, pixels: torch.Tensor, image_sizes: Any) -> torch.Tensor:
        assert pixels.shape[2:] == tuple(image_sizes[0])
        return super().forward(pixels)


@pytest.fixture
def shared(monkeypatch):
    """Two processes share every tower."""
    monkeypatch.setattr(absent.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(absent.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(absent, "is_sharded", lambda towers: True)
    monkeypatch.setattr(absent, "_said", set())


@pytest.mark.parametrize("scale", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("shared")
def test_embeddings_keep_their_values(scale, dtype):
    model = Model(scale, image_size=5)
    embeds = torch.randn(2, 3, 4, dtype=dtype).transpose(0, 1).requires_grad_()
    out = model.run(embeds)
    assert model.calls == 1
    assert out.dtype == dtype
    assert torch.equal(out, embeds)
    out.float().square().sum().backward()
    assert torch.allclose(embeds.grad, 2 * embeds.detach())
    if scale == 1:
        assert all(each.grad is not None and not each.grad.any() for each in model.tower.parameters())


@pytest.mark.usefixtures("shared")
def test_what_upstream_does_not_use_gets_no_gradient():
    model = Model(image_size=5)
    model.run(torch.zeros(1, 1, 4), outputs=("pooler_output",)).sum().backward()
    assert model.unused.grad is None
    assert model.tower[0].weight.grad is not None
    model.run(torch.zeros(1, 1, 4), outputs=("last_hidden_state",)).sum().backward()
    assert model.unused.grad is not None


@pytest.mark.usefixtures("shared")
def test_random_states_and_statistics_are_as_before():
    model = Model(image_size=5)
    before = [each.clone() for each in model.tower.buffers()]
    own, state = list(model.tower.buffers()), torch.get_rng_state()
    out = model.run(torch.zeros(1, 1, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(a is b for a, b in zip(model.tower.buffers(), own, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
    model.tower(torch.randn(1, 3, 5, 5))  # a real call changes the buffers before the backward pass
    out.sum().backward()


@pytest.mark.usefixtures("shared")
def test_nothing_runs_in_steps_of_decoding():
    model = Model(image_size=5).eval()
    embeds = torch.zeros(1, 1, 4)
    assert model.run(embeds) is embeds
    assert model.calls == 0
    model.run(torch.zeros(1, 2, 4))
    assert model.calls == 1


def test_nothing_runs_in_one_process_and_it_compiles_without_breaks():
    model, embeds = Model(image_size=5), torch.randn(1, 2, 4)
    assert model.run(embeds) is embeds
    assert torch.equal(torch.compile(model.run, fullgraph=True, backend="eager")(embeds), embeds)
    assert model.calls == 0


@pytest.mark.usefixtures("shared")
def test_an_unknown_size_is_said_once():
    model = Model()
    embeds = torch.zeros(1, 1, 4)
    with pytest.warns(VeomniHookWarning, match="Model cannot call its tower .* image_size") as said:
        assert model.run(embeds) is embeds
        model.run(embeds)
    assert len(said) == 1
    assert model.calls == 0


@pytest.mark.usefixtures("shared")
def test_an_unknown_size_is_an_error_in_strict_mode(monkeypatch):
    monkeypatch.setenv("VEOMNI_STRICT", "1")
    with pytest.raises(ParallelError, match="image_size"):
        Model().run(torch.zeros(1, 1, 4))


PIXELS, GRID = ("pixel_values",), ("pixel_values", "image_grid_thw")
SIZES, MERGED = ("pixel_values", "image_sizes"), (*GRID, "image_merge_sizes")
VIDEO = ("pixel_values_videos", "video_grid_thw")
PLACES = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
SHAPES = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
SOUND = ("input_features", "feature_attention_mask", "audio_feature_lengths")
TILES = {"image_grid_pinpoints": [[16, 24], [8, 17]], "image_size": 8}
HALVES = nn.Sequential(nn.Conv2d(1, 5, 3, 2), nn.Conv2d(5, 6, 3, 2), nn.Linear(18, 8))


@pytest.mark.parametrize(
    ("names", "layer", "config", "shapes"),
    [
        (GRID, nn.Conv3d(3, 8, (2, 7, 7)), {"spatial_merge_size": 2}, [(16, 294), (1, 3)]),
        (GRID, nn.Conv2d(3, 8, 7), {"merge_kernel_size": (1, 1)}, [(4, 3, 7, 7), (1, 3)]),
        (GRID, nn.Conv2d(3, 8, 7), {"spatial_merge_size": 1, "layout": "flat"}, [(4, 147), (1, 3)]),
        (GRID, nn.Linear(12, 8), {"spatial_merge_size": 1}, [(4, 12), (1, 3)]),
        (PIXELS, nn.Conv2d(1, 8, 7), {"image_size": (8, 9)}, [(1, 1, 8, 9)]),
        (PIXELS, nn.Conv2d(1, 8, 7), {"image_size": 8, "layout": "groups"}, [(1, 1, 1, 8, 8)]),
        (PIXELS, nn.Conv2d(3, 8, 7, 4), {}, [(1, 3, 8, 8)]),
        (PIXELS, nn.Sequential(nn.Linear(9, 8)), {"image_size": 8, "num_channels": 2}, [(1, 2, 8, 8)]),
        (PIXELS, nn.Linear(9, 8), {}, [(1, 9)]),
        (SIZES, nn.Conv2d(3, 8, 4), TILES, [(1, 4, 3, 8, 8), (1, 2)]),
        (SIZES, Sized(), {"patch_size": 4}, [(1, 3, 8, 8), (1, 2)]),
        (SIZES, nn.Conv2d(3, 8, 4), {"image_size": 8}, [(1, 3, 8, 8), None]),
        (MERGED, nn.Linear(12, 8), {}, [(4, 12), (1, 3), (1,)]),
        (VIDEO, nn.Linear(12, 8), {"spatial_merge_size": 1, "temporal_merge_size": 2}, [(8, 12), (1, 3)]),
        (PLACES, nn.Linear(12, 8), {"pooling_kernel_size": 3}, [(1, 9, 12), (1, 9, 2), (1,)]),
        (PLACES, nn.Linear(12, 8), {"pooling_kernel_size": 3, "layout": "groups"}, [(1, 1, 9, 12), (1, 1, 9, 2), (1,)]),
        (SHAPES, nn.Linear(12, 8), {"downsample_factor": 2}, [(1, 16, 12), (1, 2), (1, 16)]),
        (
            SOUND,
            nn.Conv1d(9, 8, 3),
            {"num_mel_bins": 9, "n_window": 5, "max_source_positions": 7},
            [(1, 9, 10), (1, 10), None],
        ),
        (SOUND[:2], nn.Conv1d(9, 8, 3), {"num_mel_bins": 9, "max_source_positions": 7}, [(1, 9, 14), (1, 14)]),
        (SOUND[:2], nn.Conv1d(9, 8, 3), {}, [(1, 9, 64), (1, 64)]),
        (SOUND[:1], nn.Linear(12, 8), {}, [(1, 64, 12)]),
        (SOUND[:1], nn.Linear(12, 8), {"num_mel_bins": 4, "subsampling_factor": 3}, [(1, 64, 4)]),
        (SOUND[:2], HALVES, {}, [(1, 64, 12), (1, 64)]),
        (SOUND[:2], HALVES, {"n_window": 5, "num_mel_bins": 7}, [(1, 7, 10), (1, 10)]),
    ],
)  # fmt: skip
def test_placeholders_have_the_sizes_of_the_tower(names, layer, config, shapes):
    layer.config = SimpleNamespace(**{name: each for name, each in config.items() if name != "layout"})
    how = {"layout": config.get("layout", ""), "dtype": torch.bfloat16, "device": torch.device("cpu")}
    made = placeholders(names, [layer], **how)
    assert [each if each is None else tuple(each.shape) for each in made] == shapes
    assert [each.dtype for each in made if each is not None][1:] == [torch.int64] * (
        len(names) - 1 - (None in shapes)
    )
    assert made[0].dtype is torch.bfloat16


@pytest.mark.parametrize("names", [("pixel_values", "image_grid_thw"), ("input_features", "audio_mask")])
def test_placeholders_are_where_the_embeddings_are(names):
    layer = nn.Linear(12, 8)
    layer.config = SimpleNamespace(spatial_merge_size=1)
    made = placeholders(names, [layer], dtype=torch.float32, device=torch.device("meta"))
    assert [each.device.type for each in made] == ["meta", "meta"]


@pytest.mark.usefixtures("shared")
def test_an_error_of_the_tower_says_what_it_was_called_with():
    model = Model(image_size=1)  # smaller than the kernel of its convolution
    with pytest.raises(RuntimeError) as raised:
        model.run(torch.zeros(1, 1, 4))
    assert "no pixel_values" in raised.value.__notes__[0]


#: Calls of towers in a step of text, and parameters that no gradient reaches with images either.
CALLS = {
    "mistral3": ({"vision_tower": 1, "multi_modal_projector": 1}, 0),
    "llava_next": ({"vision_tower": 1, "multi_modal_projector": 1}, 2),
    "idefics3": ({"vision_model": 1, "connector": 1}, 0),
    "gemma4": ({"vision_tower": 2, "audio_tower": 1}, 0),
}


@pytest.mark.slow
def test_towers_of_many_forms_take_their_smallest_input(facts):
    found = json.loads(facts("facts_of_absent", FACTS_HOOK="1", VEOMNI_STRICT="1").splitlines()[-1])
    assert found.keys() == CALLS.keys()
    for family, (calls, without) in CALLS.items():
        assert found[family] == {"calls": calls, "same": True, "without": without, "largest": 0.0}

"""Patch embeddings in whole vision models: the product where a patch is the input, else torch's convolution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.dispatched import compiled, targets
from tests.kernels.matching import DEVICE, close
from tests.kernels.patched_qwen3 import config_of, twins
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.tools.report.explanation import explain

OP = "patch_projection"
SMALL = {"hidden_size": 32, "intermediate_size": 48}
TOWER = {**SMALL, "depth": 2, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
         "out_hidden_size": 24}  # fmt: skip
IMAGES = {**SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 12, "patch_size": 4}
#: By family: its configuration and model, what is special about the sizes, and whether it takes patches.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "qwen2_vl": (
        "Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel", {**TOWER, "embed_dim": 32, "mlp_ratio": 2},
        True,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel",
        {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]}, True,
    ),
    "qwen3_vl": (
        "Qwen3VLVisionConfig", "Qwen3VLVisionModel",
        {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, True,
    ),
    "glm4v": ("Glm4vVisionConfig", "Glm4vVisionModel", {**TOWER, "image_size": 16}, True),
    "clip": ("CLIPVisionConfig", "CLIPVisionModel", IMAGES, False),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", IMAGES, False),
    "vit": ("ViTConfig", "ViTModel", IMAGES, False),
    "convnext": ("ConvNextConfig", "ConvNextModel", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, False),
}  # fmt: skip
PATCHES = [family for family, made in FAMILIES.items() if made[3]]
#: Modules that ask: a tower that joins patches by a second convolution does so itself.
ROWS = {"glm4v": 2}


def pair(modules: Any, family: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Upstream's model and the patched one with equal weights."""
    config, kind, sizes, _ = FAMILIES[family]
    made = config_of(family, config, **sizes)
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    return [each.to(DEVICE, dtype) for each in twins(*modules(family), kind, made, std=0.2)]


def batch(family: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Patches of two images, or a batch of images."""
    torch.manual_seed(1)
    if not FAMILIES[family][3]:
        size = 32 if family == "convnext" else 12
        return {"pixel_values": torch.randn(2, 3, size, size).to(DEVICE, dtype)}
    pixels = torch.randn(16 + 8, 3 * 2 * 4 * 4).to(DEVICE, dtype)
    return {"hidden_states": pixels, "grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]], device=DEVICE)}


def trained(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """What a step returns, and every gradient."""
    model.zero_grad()
    found = model(**inputs)
    found = found if isinstance(found, tuple) else found.to_tuple()
    outputs = [each for each in found if isinstance(each, torch.Tensor)]
    torch.manual_seed(2)
    sum((each * torch.randn_like(each)).sum() for each in outputs).backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return {**{f"output {place}": each.detach() for place, each in enumerate(outputs)}, **gradients}


def assert_equal_steps(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-4) -> None:
    assert ours.keys() == theirs.keys()
    # The gradient of a key's bias is 0 but for rounding: it is compared beside the others.
    largest = max(each.abs().max().item() for each in theirs.values() if each is not None)
    for name, truth in theirs.items():
        found = ours[name]
        assert (found is None) == (truth is None), name
        if truth is not None:
            assert (found.shape, found.stride()) == (truth.shape, truth.stride()), name
            scale = torch.tensor([1e-3 * largest], device=truth.device)
            close(*(torch.cat([each.flatten(), scale]) for each in (found, truth)), tolerance)


def outcomes(model: Any) -> list[tuple[str, str]]:
    return [(row.backend, row.reason) for row in explain(model).rows if row.op == OP]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_train_as_upstream(modules, family):
    theirs, ours = pair(modules, family)
    inputs = batch(family)
    set_choice(f"{OP}=torch")
    step = trained(ours, inputs)
    assert outcomes(ours) == [("torch", "chosen")] * ROWS.get(family, 1)
    assert_equal_steps(step, trained(theirs, inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_takes_the_product_for_patches(modules, family):
    theirs, ours = pair(modules, family)
    inputs = batch(family)
    set_choice("auto")
    step = trained(ours, inputs)
    copied = DEVICE == "cpu" and not FAMILIES[family][3]  # a GPU gains by the copy
    expected = {"eager": "several blocks"} if copied else {"torch": "picked by auto"}
    for backend, reason in outcomes(ours):
        assert expected[backend] in reason
    assert len(outcomes(ours)) == ROWS.get(family, 1)
    assert_equal_steps(step, trained(theirs, inputs))


@pytest.mark.parametrize("family", PATCHES)
def test_in_bfloat16(modules, family):
    theirs, ours = pair(modules, family, torch.bfloat16)
    inputs = batch(family, torch.bfloat16)
    set_choice(f"{OP}=torch")
    found, truth = (each(**inputs) for each in (ours, theirs))
    first, expected = (each[0] if isinstance(each, tuple) else each.to_tuple()[0] for each in (found, truth))
    assert first.dtype is torch.bfloat16
    close(first, expected, 5e-2)


def test_a_convolution_with_a_hook_is_called(modules):
    theirs, ours = pair(modules, "qwen2_5_vl")
    seen = []
    for model in (theirs, ours):
        model.patch_embed.proj.register_forward_hook(lambda *_: seen.append(1))
    inputs = batch("qwen2_5_vl")
    set_choice("auto")
    assert_equal_steps(trained(ours, inputs), trained(theirs, inputs))
    assert len(seen) == 2
    assert outcomes(ours) == [("eager", "the convolution has hooks, which a kernel would skip")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("choice", ["auto", f"{OP}=torch", f"{OP}=eager"])
def test_compiled_without_a_break(modules, choice):
    theirs, ours = (each.patch_embed for each in pair(modules, "qwen3_vl"))
    set_choice(choice)
    torch.compiler.reset()
    run, counter = compiled(ours)
    for _ in range(2):
        pixels = batch("qwen3_vl")["hidden_states"]
        found, truth = run(pixels), theirs(pixels)
    assert counter.frame_count == 1
    close(found, truth, 1e-5)
    called = " ".join(targets(counter))
    # Inductor would call the library's convolution, which is slower: `auto` takes the product.
    assert ("conv3d" in called) == (choice == f"{OP}=eager"), called
    assert ("linear" in called) == (choice != f"{OP}=eager"), called

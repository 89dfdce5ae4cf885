"""How far models with towers are from one process, where processes share images, frames and chunks of sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import veomni_hook
from tests.multimodal.families import accepted, batch, model
from tests.parallel.facts_of_models import run
from tests.parallel.small import relative, worst
from veomni_hook.errors import ParallelError
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.parallel import process

_TEXT = ("text", 3)
#: One sample each. Shares of several sizes; fewer images than processes; nothing to share; no image.
BATCHES: dict[str, list[list[tuple[str, Any]]]] = {
    "images": [[("image", (1, 4, 6)), _TEXT, ("image", (1, 8, 12)), _TEXT, ("image", (1, 4, 4)), _TEXT]],
    "two images": [[("image", (1, 4, 6)), _TEXT, ("image", (1, 4, 4)), ("text", 5)]],
    "image": [[("image", (1, 4, 6)), ("text", 5)]],
    "text": [[("text", 9)]],
    "video": [[("image", (1, 4, 6)), _TEXT, ("video", (3, 4, 4)), ("text", 4)]],
    "sounds": [[_TEXT, ("audio", 230), _TEXT, ("audio", 100), _TEXT, ("audio", 61), ("image", (1, 4, 4))]],
}


TOWERS = ("visual", "vision_tower", "audio_tower")


class _Rows:
    """How many rows the layers of each tower get."""

    def __init__(self, made: nn.Module) -> None:
        self.seen: list[int] = []
        for name, part in made.named_modules():
            inside = any(f"{each}." in name for each in TOWERS)
            inside = inside and "language_model" not in name
            if inside and isinstance(part, nn.ModuleList) and name.rpartition(".")[2] in ("blocks", "layers"):
                part[0].register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.seen.append((given[0] if given else named["hidden_states"]).shape[0])


def compared(made: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """How far a model is from one process, where, and the rows of the layers in one and in several."""
    rows, found = _Rows(made), []
    for sizes in ("", "sp=2" if distributed.get_world_size() == 2 else "sp=4"):
        found.append((run(made, {**inputs, "use_cache": False}, sizes, []), rows.seen))
        rows.seen = []
    (one, whole), (split, own) = found
    far, name = worst(split, one)
    tower = sum(any(each in name for each in TOWERS) for name in one)
    return {"worst": far, "name": name, "tower": tower, "whole": whole, "rows": own}


def facts(family: str, kernels: str, batches: list[str]) -> dict[str, Any]:
    """Return the largest relative difference of losses, logits and gradients, and rows of the layers, by batch."""
    found = {}
    for name in batches:
        made = model(family)
        # Now: the first import of a model tells the settings of the server.
        set_choice(kernels)
        found[name] = compared(made, accepted(made, batch(family, BATCHES[name])))
    return found


CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def _compared(made: Any, **given: Any) -> dict[str, Any]:
    return compared(made, {**accepted(made, batch("qwen3_vl", BATCHES["images"])), **given})


@check
def recomputed() -> Any:
    found = {}
    for reentrant in (True, False):
        made = model("qwen3_vl")
        made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found[str(reentrant)] = _compared(made)
    return found


@check
def frozen() -> Any:
    found = []
    for _ in range(2):
        made = model("qwen3_vl")
        made.model.visual.requires_grad_(False)
        found.append(_compared(made))
    return found


@check
def partly_frozen() -> Any:
    made = model("qwen3_vl")
    made.model.visual.requires_grad_(False)
    made.model.visual.blocks[1].requires_grad_(True)
    return _compared(made)


@check
def arguments_behind_the_layers() -> Any:
    """The tower of Kimi-K2.5: it hands its ``**kwargs`` to its layers, and reads them behind them again."""
    from transformers import AutoModelForImageTextToText, Kimi_K25Config

    image, sizes = 90, torch.tensor([[1, 4, 6], [1, 4, 4], [1, 8, 12]])
    config = Kimi_K25Config(
        text_config={
            "model_type": "qwen3", "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24,
            "pos_emb_height": 8, "pos_emb_width": 8,
        },
        projection_hidden_size=16, image_token_id=image, video_token_id=91,
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForImageTextToText.from_config(config).train()
    for name, each in made.named_parameters():
        if "position_embeddings" in name:
            nn.init.normal_(each)
    tokens = [each for _, h, w in sizes.tolist() for each in (3, *[image] * (h * w // 4), 5)]
    ids = torch.tensor([tokens])
    pixels = torch.randn(int(sizes.prod(1).sum()), 3, 14, 14)
    return compared(made, {"input_ids": ids, "labels": ids, "image_grid_thw": sizes, "pixel_values": pixels})


@check
def without_gradients() -> list[int]:
    made = model("qwen3_vl")
    rows = _Rows(made)
    process.tell("sp=2")
    with torch.no_grad():
        made(**accepted(made, batch("qwen3_vl", BATCHES["images"])))
    return rows.seen


@check
def hidden_states_of_layers() -> Any:
    return _compared(model("qwen3_vl"), output_hidden_states=True)


@check
def a_layer_of_the_user() -> Any:
    """Layers that look at other images: an image is not computed without the others."""
    made = model("qwen3_vl")
    mlp = made.model.visual.blocks[1].mlp
    own = type(mlp).forward
    mlp.forward = lambda x: own(mlp, x - x.mean(0))
    return {**_compared(made), "explain": str(veomni_hook.explain(made))}


@check
def told() -> str:
    return str(veomni_hook.explain(model("qwen3_vl")))


@check
def other_images() -> str:
    made = model("qwen3_vl")
    inputs = accepted(made, batch("qwen3_vl", BATCHES["images"]))
    inputs["pixel_values"] = inputs["pixel_values"] + distributed.get_rank()
    process.tell("sp=2")
    try:
        made(**inputs)
    except ParallelError as error:
        return str(error)
    return "no error"


@check
def fully_sharded() -> float:
    """Two groups: one has several images and text alone, the other one image, and an image and a video."""
    half, mesh = distributed.get_rank() // 2, init_device_mesh("cpu", (distributed.get_world_size(),))
    made, plain = model("qwen2_5_vl"), model("qwen2_5_vl")
    names = [["images", "text"], ["image", "video"]]
    batches = [[accepted(made, batch("qwen2_5_vl", BATCHES[each])) for each in pair] for pair in names]
    process.tell("")
    for inputs in (*batches[0], *batches[1]):
        (plain(**inputs, use_cache=False).loss / 2).backward()
    process.tell("sp=2")
    for each in (*made.model.visual.blocks, *made.model.language_model.layers):
        fully_shard(each, mesh=mesh)
    fully_shard(made, mesh=mesh)
    for inputs in batches[half]:
        made(**inputs, use_cache=False).loss.backward()
    wanted = {name: each.grad for name, each in plain.named_parameters()}
    return max(relative(each.grad.full_tensor(), wanted[name]) for name, each in made.named_parameters())


def special(checks: list[str]) -> dict[str, Any]:
    """Return what each check found, in one process after the other."""
    set_choice("eager")
    return {name: CHECKS[name]() for name in checks}

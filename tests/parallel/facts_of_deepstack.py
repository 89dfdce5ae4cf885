"""How far models that add features of images between their layers are from one process, split over several."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from tests.multimodal.families import accepted, batch, model
from tests.parallel.facts_of_models import run
from tests.parallel.small import worst
from veomni_hook.errors import ParallelError
from veomni_hook.kernels.selection.process_choice import set_choice

#: Rows of lengths that no number of processes divides; images in one part of the positions, in both, in none.
BATCHES: dict[str, list[list[tuple[str, Any]]]] = {
    "images": [[("text", 3), ("image", (1, 4, 6)), ("text", 4), ("image", (1, 4, 4))], [("text", 9)]],
    "at the end": [[("text", 15), ("image", (1, 4, 4))]],
    "at the beginning": [[("image", (1, 4, 4)), ("text", 12)], [("image", (1, 4, 4)), ("text", 9)]],
    "text": [[("text", 7)], [("text", 9)]],
    "image and video": [[("text", 2), ("image", (1, 4, 4)), ("text", 3), ("video", (2, 4, 4)), ("text", 4)]],
}


def facts(
    family: str, kernels: str, batches: list[str], *, checkpoint: bool = False, compiled: bool = False
) -> dict[str, Any]:
    """Return the largest relative difference of losses, logits and gradients, by batch, and its name."""
    found = {}
    for name in batches:
        made = model(family)
        # Now: the first import of a model tells the settings of the server.
        set_choice(kernels)
        if checkpoint:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        inputs = {**accepted(made, batch(family, BATCHES[name])), "use_cache": False}
        one = run(made, inputs, "", [])
        if compiled:
            made.model.language_model.compile(backend="eager")
        split = run(made, inputs, f"sp={distributed.get_world_size()}", [])
        far, where = worst(split, one)
        tower = sum("visual" in each for each in one)
        linked = sum(each.__dict__.get("_veomni_sequence") is not None for each in made.modules())
        found[name] = {"worst": far, "name": where, "tower": tower, "linked": linked}
    return found


def refused() -> str:
    """What a mask of a part of the positions is answered."""
    made = model("qwen3_vl").model.language_model
    from veomni_hook.parallel import process

    process.tell(f"sp={distributed.get_world_size()}")
    embeds = torch.zeros(1, 8, made.config.hidden_size)
    try:
        made(
            inputs_embeds=embeds,
            visual_pos_masks=torch.ones(1, 4, dtype=torch.bool),
            deepstack_visual_embeds=[embeds[0, :4]],
            use_cache=False,
        )
    except ParallelError as error:
        return str(error)
    return ""

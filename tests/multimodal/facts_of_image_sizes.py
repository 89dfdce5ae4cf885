"""Counts when the host would wait for the sizes of images in Mistral3 and LLaVA with Pixtral's tower.

The hook is on if the environment has ``FACTS_HOOK=1``. Prints JSON: by family and by where the sizes are (a
``tensor`` on the pretended device, or a ``list``), the waits of a forward pass, and the loss.
"""

from __future__ import annotations

import json
import os
from typing import Any

if os.environ.get("FACTS_HOOK") == "1":
    import veomni_hook.install  # noqa: F401

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.multimodal.facts_of_absent import FAMILIES
from tests.multimodal.facts_of_waits import as_on_cuda, waits
from tests.multimodal.pretended import on_device, sent

IMAGE = 5
PARTS = {name: FAMILIES["mistral3"][0][name] for name in ("text_config", "vision_config")}
#: The fields of each family, and how many tokens two images of 4 x 4 and 2 x 4 patches have.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "mistral3": ({**FAMILIES["mistral3"][0], "spatial_merge_size": 2}, 4 + 2),
    "llava": ({**PARTS, "vision_feature_select_strategy": "full", "vision_feature_layer": -1}, 16 + 8),
}


def counted(family: str, *, listed: bool) -> dict[str, Any]:
    """The waits of a step with two images."""
    fields, tokens = MODELS[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **fields, image_token_id=IMAGE)
    model = on_device(AutoModelForImageTextToText.from_config(config).train())
    ids = torch.cat([torch.full((1, tokens), IMAGE), torch.randint(6, 60, (1, 8))], 1)
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == IMAGE, -100),
        "pixel_values": torch.randn(2, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16], [8, 16]]),
    }
    inputs = sent(batch)
    if listed:
        inputs["image_sizes"] = [tuple(each) for each in batch["image_sizes"].tolist()]
    return waits(model, inputs)


if __name__ == "__main__":
    as_on_cuda()
    print(
        json.dumps(
            {
                family: {name: counted(family, listed=name == "list") for name in ("tensor", "list")}
                for family in MODELS
            }
        )
    )

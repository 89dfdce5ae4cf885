"""How often the host waits in a step on a pretended GPU: `python -m tests.veomni.effects.waits SIDE FOLDER...`.

``SIDE`` is ``theirs`` (VeOmni's generated modules, with what its data pipeline adds) or ``ours`` (the hook with
`host_values` and `collate_metadata`). Prints JSON: by folder the waits of a batch with pictures, forward and backward;
ours also has those of a batch of text while another process has pictures, and the tower's gradients that are missing then.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

if sys.argv[1] == "ours":
    import veomni_hook.install  # noqa: F401

import torch
from torch import Tensor

from tests.multimodal import facts_of_waits
from tests.multimodal.families import accepted
from tests.multimodal.pretended import on_device, sent
from tests.veomni import newer, sides
from tests.veomni.configurations import CLASSES
from tests.veomni.effects.batches import classes, upstreams, veomnis


def theirs(folder: str) -> dict[str, Any]:
    """VeOmni's waits, with masks, sizes and positions from its pipeline."""
    (name, *_), (kind, *_) = CLASSES[folder], classes(folder)
    model = sides.model(sides.side(folder, "gpu"), folder, name)
    batch = veomnis(folder, kind)["media"]
    grids = {key: batch[key].clone() for key in ("image_grid_thw", "video_grid_thw")}
    model.get_metadata_collate_func()(grids, {}) if hasattr(model, "get_metadata_collate_func") else None
    places = torch.arange(batch["input_ids"].shape[1]).view(1, 1, -1).expand(1, 3, -1).contiguous()
    batch = {"position_ids": places, **batch, **{k: v for k, v in grids.items() if not isinstance(v, Tensor)}}
    moved = {
        key: sent({key: value})[key] if isinstance(value, Tensor) else value for key, value in batch.items()
    }
    return {"media": _waits(on_device(model), moved)}


def ours(folder: str) -> dict[str, Any]:
    """The hook's waits on the same batch."""
    from veomni_hook.multimodal import batches, collate_metadata

    (kind, *_) = classes(folder)
    model = on_device(newer.model(sides.side(folder), folder, kind))
    inputs = upstreams(folder, kind)
    media = collate_metadata(model.config)(inputs["media"])
    known = {
        name: value for name, value in media.items() if not name.startswith(("image_mask", "video_mask"))
    }
    result = {"media": _waits(model, batches.sent(sent, known))}
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    model.zero_grad(set_to_none=True)
    text = accepted(model, collate_metadata(model.config)(inputs["text"]))
    with facts_of_waits.shared():
        result["text"] = _waits(model, batches.sent(sent, text))
    result["without gradients"] = [
        name for name, p in model.named_parameters() if p.grad is None and name not in unused
    ]
    return result


def _waits(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    model.set_attn_implementation("sdpa")
    # The balancing loss turns autocast off, which the pretended device does not know.
    told = facts_of_waits.waits(model, {**batch, "output_router_logits": False})
    return {name: told[name] for name in ("forward", "backward", "where")}


def main() -> None:
    torch.set_num_threads(1)
    side, *folders = sys.argv[1:]
    if side == "theirs":
        sides.prepare()
    else:
        facts_of_waits.as_on_cuda()
    results = {}
    for folder in folders:
        try:
            results[folder] = {"theirs": theirs, "ours": ours}[side](folder)
        except Exception as error:
            results[folder] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(results), flush=True)
    # Torch ends the pretended device's threads by aborting the process.
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

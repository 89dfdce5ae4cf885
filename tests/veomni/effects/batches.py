"""What models are called with on both sides: text, packed text, pictures and sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.veomni import newer
from tests.veomni.configurations import CLASSES, IMAGE
from tests.veomni.inputs import PACKED_ONLY, SEES, inputs

CLASSIFIES = "ForSequenceClassification"
#: What VeOmni's data pipeline adds for its own models.
_ADDED = ("image_mask", "video_mask", "audio_mask", "cu_seqlens_list_q", "audio_feature_lengths")


def classes(folder: str) -> tuple[str, ...]:
    """The classes that are trained; of a model that also speaks, the part that upstream can call."""
    return (newer.THINKERS.get(folder, CLASSES[folder][0]), *CLASSES[folder][1:])


def sees(folder: str, kind: str) -> bool:
    """Whether the class takes pictures."""
    return folder in SEES and not kind.endswith("ForCausalLM")


def upstreams(folder: str, kind: str) -> dict[str, dict[str, Any]]:
    """Batches by name, as upstream's models take them: ``text``, ``media`` and ``packed``."""
    named = dict(newer.batches(folder, kind))
    if not kind.endswith(CLASSIFIES):
        packed = veomnis(folder, kind)["packed"]
        named["packed"] = {name: value for name, value in packed.items() if name not in _ADDED}
        if sees(folder, kind):  # a row for samples and three for pictures
            named["packed"]["position_ids"] = packed["position_ids"].transpose(0, 1)[:1].repeat(4, 1, 1)
    return named


def veomnis(folder: str, kind: str) -> dict[str, dict[str, Any]]:
    """The same batches as VeOmni's data pipeline makes them."""
    named = dict(newer.batches(folder, kind)) if folder not in (*PACKED_ONLY, *newer.THINKERS) else {}
    if kind.endswith(CLASSIFIES):  # VeOmni's label is that of a token; upstream's is that of the last one
        tokens = named["text"]["input_ids"]
        named["text"]["labels"] = torch.full_like(tokens, -100).index_put_(
            (torch.arange(len(tokens)), torch.tensor(-1)), named["text"]["labels"]
        )
        return named
    made = inputs(folder, kind if kind in CLASSES[folder] else CLASSES[folder][0])
    named |= {name: made[name] for name in ("packed", "media") if name in made}
    # The balancing loss is a mean over the tokens of a batch, and not always added by VeOmni.
    named["packed"]["output_router_logits"] = False
    return named


def of_rank(rank: int) -> dict[str, Tensor]:
    """Two rows of text, others on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randint(3, IMAGE, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}

"""Runs a training step of every family and batch; writes losses, logits and gradients to a file.

    python -m tests.multimodal.facts_of_families FILE [family ...]

The hook is on if the environment has ``FACTS_HOOK=1``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

if os.environ.get("FACTS_HOOK") == "1":
    import veomni_hook.install  # noqa: F401

import torch

from tests.multimodal.families import FAMILIES, accepted, batch, batches, model
from veomni_hook.multimodal import position_ids

SIDES = ("right", "left")
#: Families whose attention alone mixes positions, and whose text models take packed positions.
PACKING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
PACKED: list[list[tuple[str, Any]]] = [
    [("text", 3), ("image", (1, 4, 6)), ("text", 4)],
    [("image", (1, 6, 4)), ("text", 5)],
]


def step(made: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The loss and every gradient of a training step, and the logits of an evaluation."""
    made.zero_grad()
    loss = made(**inputs).loss
    loss.backward()
    found = {name: each.grad.clone() for name, each in made.named_parameters() if each.grad is not None}
    with torch.no_grad():
        logits = made.eval()(**inputs).logits
    made.train()
    return {"loss": loss.detach(), "logits": logits, **found}


def packed(family: str, made: Any) -> tuple[float, float]:
    """The largest difference of logits between packed samples and separate ones, and the largest logit.

    Positions of a packed sequence have four rows: that of text begins anew with each sample.
    """
    separate, parts, positions = [], [], []
    made.eval()
    for sample in PACKED:
        whole = batch(family, [sample])
        inputs = accepted(made, whole)
        del inputs["labels"]
        separate.append(_logits(made, inputs))
        text = torch.arange(whole["input_ids"].shape[1]).view(1, 1, -1)
        positions.append(torch.cat([text, position_ids(made.config)(whole)]))
        parts.append(inputs)
    names = {"input_ids": 1, "pixel_values": 0, "image_grid_thw": 0}
    joined = {name: torch.cat([part[name] for part in parts], at) for name, at in names.items()}
    found = _logits(made, {**joined, "position_ids": torch.cat(positions, 2)})
    made.train()
    truth = torch.cat(separate)
    return (found - truth).abs().max().item(), truth.abs().max().item()


def _logits(made: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return made(**inputs, use_cache=False).logits[0]


def main(path: str, *families: str) -> None:
    """Write what every step computes, by family, batch and side of the padding."""
    torch.set_num_threads(1)
    found: dict[tuple[str, str, str], dict[str, torch.Tensor]] = {}
    routed: dict[str, set[str]] = {}
    packing: dict[str, tuple[float, float]] = {}
    for family in families or FAMILIES:
        made = model(family)
        for name, samples in batches(family).items():
            for side in SIDES:
                inputs = accepted(made, batch(family, samples, side=side))
                found[family, name, side] = step(made, inputs)
        if family in PACKING:
            packing[family] = packed(family, made)
        if os.environ.get("FACTS_HOOK") == "1":
            from veomni_hook import explain

            routed[family] = {row.op for row in explain(made).rows if row.backend not in ("eager", "-")}
    torch.save((found, routed, packing), path)


if __name__ == "__main__":
    main(*sys.argv[1:])

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

SIDES = ("right", "left")


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


def main(path: str, *families: str) -> None:
    """Write what every step computes, by family, batch and side of the padding."""
    torch.set_num_threads(1)
    found: dict[tuple[str, str, str], dict[str, torch.Tensor]] = {}
    routed: dict[str, set[str]] = {}
    for family in families or FAMILIES:
        made = model(family)
        for name, samples in batches(family).items():
            for side in SIDES:
                inputs = accepted(made, batch(family, samples, side=side))
                found[family, name, side] = step(made, inputs)
        if os.environ.get("FACTS_HOOK") == "1":
            from veomni_hook import explain

            routed[family] = {row.op for row in explain(made).rows if row.backend not in ("eager", "-")}
    torch.save((found, routed), path)


if __name__ == "__main__":
    main(*sys.argv[1:])

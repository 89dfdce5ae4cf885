"""Runs a training step of every family and batch on a GPU; prints when its host waits.

    python -m tests.multimodal.facts_of_waits_on_gpu [family ...]

As `facts_of_waits`, with what `torch.cuda.set_sync_debug_mode` says instead of the pretended device. Each
batch is run once before, in which kernels are compiled; tensors are sent anew for the step that counts.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

if os.environ.get("FACTS_HOOK") == "1":
    import veomni_hook.install  # noqa: F401

import torch

from tests.multimodal.families import FAMILIES, accepted, batch, batches, model
from veomni_hook.multimodal import collate_metadata


def waits(made: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the host of a step waited for, and the loss."""
    _step(made, inputs)
    sent = {name: value.to("cuda") for name, value in inputs.items()}
    made.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loss = made(**sent, use_cache=False).loss
            forward = len(told)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    where = [
        f"{each.filename.rpartition('site-packages/')[2]}:{each.lineno}"
        for each in told
        if "synchronizing CUDA operation" in str(each.message)
    ]
    return {"forward": where[:forward], "backward": where[forward:], "loss": loss.item()}


def _step(made: Any, inputs: dict[str, Any]) -> None:
    made(**{name: value.to("cuda") for name, value in inputs.items()}, use_cache=False).loss.backward()


def main(*families: str) -> None:
    """Print the waits of every family and batch."""
    found: dict[str, dict[str, Any]] = {}
    for family in families or FAMILIES:
        made = model(family).to("cuda", torch.bfloat16)
        add = collate_metadata(made.config)
        for name, samples in batches(family).items():
            plain = accepted(made, batch(family, samples))
            more = add(batch(family, samples))
            extra = {
                key: more[key] for key in more.keys() - plain.keys() if key.startswith(("image_", "video_"))
            }
            done = found.setdefault(family, {})
            try:
                done[name] = {
                    "plain": waits(made, plain),
                    "metadata": waits(made, {**accepted(made, more), **extra}),
                }
            except RuntimeError as error:  # errors of kernels come up later, and do not say where
                raise RuntimeError(f"{family}, batch {name!r}, after {[*done]}") from error
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

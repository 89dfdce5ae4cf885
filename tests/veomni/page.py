"""The training script of docs/veomni.md: a transformers model and a plain loop; nothing of VeOmni is called.

Arguments: the folder of VeOmni whose model is trained, and modules to import before it. `VEOMNI_PATCHES` says which
configs apply. Prints the losses of three steps by class, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import torch

import veomni_hook.install  # noqa: F401
from tests.veomni.configurations import CLASSES, CONFIGURATIONS, configuration
from tests.veomni.inputs import inputs
from tests.veomni.sides import weighted

STEPS = 3


def losses(module: Any, folder: str) -> dict[str, list[float]]:
    """Train a small model of each class on fixed data."""
    found: dict[str, list[float]] = {}
    for trained in CLASSES[folder]:
        torch.manual_seed(0)
        made = getattr(module, trained)._from_config(
            configuration(folder, trained), attn_implementation="eager"
        )
        optimizer = torch.optim.AdamW(weighted(made).parameters(), lr=5e-3)
        batches = [batch for name, batch in inputs(folder, trained).items() if name != "dummy"]
        found[trained] = []
        for step in range(STEPS):
            loss = made(**batches[step % len(batches)], use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[trained].append(loss.item())
    return found


def main() -> None:
    torch.set_num_threads(1)
    folder, *others = sys.argv[1:]
    for other in others:
        import_module(other)
    family = CONFIGURATIONS[folder][0]
    print(json.dumps(losses(import_module(f"transformers.models.{family}.modeling_{family}"), folder)))


if __name__ == "__main__":
    main()

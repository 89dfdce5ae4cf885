"""A training script, run with the hook and with VeOmni's generated modules: prints the losses as one line of JSON.

Arguments: `hook` or `generated`; which of transformers' models and veomni is imported first; the folders.
"""

from __future__ import annotations

import json
import sys

import torch

import veomni_hook.install  # noqa: F401
from tests.veomni.configurations import CLASSES
from tests.veomni.inputs import STEPS, inputs
from tests.veomni.sides import model, prepare, side


def losses(folder: str, device: str) -> list[float]:
    """Train a small model on fixed data."""
    made = model(side(folder, device), folder)
    optimizer = torch.optim.AdamW(made.parameters(), lr=5e-3)
    given = [batch for name, batch in inputs(folder, CLASSES[folder][0]).items() if name != "dummy"]
    found = []
    for step in range(STEPS):
        loss = made(**given[step % len(given)], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    torch.set_num_threads(1)
    source, first, *folders = sys.argv[1:]
    device = "gpu" if source == "generated" else ""
    if first == "models":
        for folder in folders:
            side(folder, device)
    prepare()
    print(json.dumps({folder: losses(folder, device) for folder in folders}))


if __name__ == "__main__":
    main()

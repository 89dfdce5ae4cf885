"""What one rank of a crew does: every function is a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.experts import models

_ALONE: dict[Any, Any] = {}


def _alone(folder: Path, family: str) -> Any:
    key = folder, family
    if key not in _ALONE:
        path = models.saved(folder, family)
        _ALONE[key] = models.alone(path, family, dist.get_world_size())
    return _ALONE[key]


def step(
    folder: Path, family: str, ep: int, implementation: str = "veomni", checkpointing: str = "", **more: Any
) -> dict[str, Any]:
    """One forward and backward: how far loss and gradients are from those of one process."""
    losses, expected = _alone(folder, family)
    model = models.sharded(models.saved(folder, family), family, ep, implementation, **more)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    rank = dist.get_rank()
    loss = model(**models.batch(rank)).loss
    loss.backward()
    far = models.apart(models.gradients(model), expected)
    worst = max(far, key=far.__getitem__)
    return {"loss": abs(loss.item() - losses[rank]) / abs(losses[rank]), "worst": worst, "gradient": far[worst]}

"""Whether the setting asks for divided experts in this process, and how many processes the job has."""

from __future__ import annotations

import os
import sys

from veomni_hook.parallel import process

__all__ = ["is_asked", "world_size"]


def is_asked(*own: object) -> bool:
    """Whether the setting asks for divided experts, and the script sets up nothing of its ``own``."""
    return process.sizes().ep > 1 and not any(given is not None for given in own) and not _accelerate_splits()


def world_size() -> int:
    """Return how many processes the job has."""
    from torch import distributed  # here: reports ask who divided experts, without torch

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _accelerate_splits() -> bool:
    """Whether the script has given accelerate a `ParallelismConfig`."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return getattr(state, "_shared_state", {}).get("parallelism_config") is not None

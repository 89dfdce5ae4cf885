"""The sizes in force in this process, and how many processes the job has.

The hook tells them with every activation and every patched import. Until then (a plain loop may ask for its
share of the data before it imports a model), they are those of the environment and the settings file.

Parallelism that the script has set up itself wins: from `give_way` on, every axis has size 1.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from functools import cache

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.settings import axes_of, resolve

__all__ = ["SETTING", "asks_for_ep", "give_way", "is_joined", "left_out", "sizes", "tell", "world_size"]

#: Where errors about it are.
SETTING = "the setting `parallel` (VEOMNI_PARALLEL)"


@dataclass(frozen=True)
class Sizes:
    """How many processes share one sequence (``sp``), and how many share the experts of a layer (``ep``)."""

    sp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in vars(self).items() if size > 1) or "none"


_told: Sizes | None = None
_left_out: str | None = None


def tell(text: str) -> None:
    """Set the sizes: the value of the setting ``parallel``; empty: every axis has size 1."""
    global _told  # noqa: PLW0603
    _told = Sizes(**axes_of("" if _left_out else text))


def give_way(reason: str) -> None:
    """Leave the setting out in this process from now on, and say which sizes, and why."""
    global _told, _left_out
    _told, _left_out = Sizes(), f"{sizes()} is left out: {reason}"
    warnings.warn(
        f"{_left_out}. To say which of them you want, remove it, or unset VEOMNI_PARALLEL",
        VeomniHookWarning,
        stacklevel=4,
    )


def left_out() -> str | None:
    """Return what `give_way` has left out, and why; None: nothing."""
    return _left_out


def sizes() -> Sizes:
    """Return the sizes in force.

    Raises:
        SettingsError: no activation has told them, and a setting is invalid.
    """
    return _resolved() if _told is None else _told


def asks_for_ep(*own: object) -> bool:
    """Whether the setting asks for divided experts, and the script sets up nothing of its ``own``."""
    if sizes().ep == 1 or any(given is not None for given in own):
        return False
    # Nor has it given accelerate a `ParallelismConfig`.
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return getattr(state, "_shared_state", {}).get("parallelism_config") is None


def is_joined() -> bool:
    """Whether this process has joined those of its job (torch.distributed)."""
    from torch import distributed  # here: reports ask who divided experts, without torch

    return distributed.is_available() and distributed.is_initialized()


def world_size() -> int:
    """Return how many processes the job has; before they have joined, those that torchrun has started."""
    if is_joined():
        from torch import distributed

        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


@cache
def _resolved() -> Sizes:
    settings = resolve().settings
    return Sizes(**axes_of(settings.parallel if settings.enabled else ""))

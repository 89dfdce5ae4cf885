"""What VeOmni's older registry (``OpSpec.backends``) loads by ``module:attribute``, for each backend.

The names are made on request: VeOmni reads them when it applies a configuration, and a kernel that cannot
run on the machine must be an error then, and not when this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from veomni_hook.integrations.veomni import adapters
from veomni_hook.integrations.veomni.backend import BACKENDS

__all__ = ["LEGACY", "entry"]

#: The ops of the older registry that are offered: what makes the function, and whether it is a ``forward``.
LEGACY: dict[str, tuple[Callable[[str], Any], bool]] = {
    "load_balancing_loss": (adapters.load_balancing_loss, False),
    "rms_norm": (adapters.norm_forward, True),
}


def entry(op: str, backend: str) -> str:
    """Return the reference ``module:attribute`` of an entry."""
    return f"{__name__}:{op}_{backend}"


@cache
def __getattr__(name: str) -> object:
    op, _, backend = name.rpartition("_")
    if op in LEGACY and backend in BACKENDS:
        return LEGACY[op][0](backend)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

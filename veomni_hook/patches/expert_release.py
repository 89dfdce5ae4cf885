"""Which releases of transformers divide experts among processes. Imports neither torch nor transformers."""

from __future__ import annotations

from veomni_hook import releases

__all__ = ["DISPATCHES", "LEAST", "NAME", "dispatches", "divides_experts"]

#: This package's dispatch in ``DistributedConfig(ep_implementation=…)``.
NAME = "veomni"
#: The first release in which experts are divided.
LEAST = "5.9"
#: The first release in which transformers divides them itself and lets this package dispatch. Before,
#: `veomni_hook.parallel.expert_division` divides them.
DISPATCHES = "5.23"


def divides_experts() -> bool:
    """Whether experts can be divided in the installed release."""
    return _installed() >= releases.minor(LEAST)


def dispatches() -> bool:
    """Whether the installed release divides experts itself and lets this package dispatch tokens."""
    return _installed() >= releases.minor(DISPATCHES)


def _installed() -> tuple[int, ...]:
    return releases.minor(releases.installed("transformers") or "")

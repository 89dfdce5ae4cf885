"""Which releases of transformers divide experts among processes. Imports neither torch nor transformers."""

from __future__ import annotations

__all__ = ["DISPATCHES", "LEAST", "NAME", "dispatches", "divides_experts", "installed"]

#: This package's dispatch in ``DistributedConfig(ep_implementation=…)``.
NAME = "veomni"
#: The first release with `DistributedConfig.ep_size` and dispatch of tokens.
LEAST = "5.20"
#: The first release in which dispatch can be replaced. Before, gradients of experts that one process alone
#: holds (``ep`` is the number of processes) are divided twice, at least on other backends than NCCL.
DISPATCHES = "5.23"


def installed() -> str:
    """Return the installed release of transformers."""
    # Here: the finder loads this module, and most processes never ask.
    from importlib import metadata

    return metadata.version("transformers")


def divides_experts() -> bool:
    """Whether the installed release has expert parallelism on FSDP2."""
    return _numbers(installed()) >= _numbers(LEAST)


def dispatches() -> bool:
    """Whether the installed release lets this package dispatch tokens."""
    return _numbers(installed()) >= _numbers(DISPATCHES)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])

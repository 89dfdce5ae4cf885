"""Which releases of transformers divide experts among processes. Imports neither torch nor transformers."""

from __future__ import annotations

__all__ = ["LEAST", "divides_experts", "installed"]

#: The first release with `DistributedConfig.ep_size` and dispatch of tokens.
LEAST = "5.20"


def installed() -> str:
    """Return the installed release of transformers."""
    # Here: the finder loads this module, and most processes never ask.
    from importlib import metadata

    return metadata.version("transformers")


def divides_experts() -> bool:
    """Whether the installed release has expert parallelism on FSDP2."""
    return _numbers(installed()) >= _numbers(LEAST)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])

"""The sizes in force in this process.

The hook tells them with every activation and every patched import. Until then (a plain loop may ask for its
share of the data before it imports a model), they are those of the environment and the settings file.
"""

from __future__ import annotations

from functools import cache

from veomni_hook.parallel.sizes import Sizes
from veomni_hook.settings import resolve

__all__ = ["sizes", "tell"]

_told: Sizes | None = None


def tell(text: str) -> None:
    """Set the sizes: the value of the setting ``parallel``; empty: every axis has size 1."""
    global _told  # noqa: PLW0603
    _told = _parsed(text)


def sizes() -> Sizes:
    """Return the sizes in force.

    Raises:
        SettingsError: no activation has told them, and a setting is invalid.
    """
    return _resolved() if _told is None else _told


@cache
def _parsed(text: str) -> Sizes:
    return Sizes.parse(text)


@cache
def _resolved() -> Sizes:
    settings = resolve().settings
    return Sizes.parse(settings.parallel if settings.enabled else "")

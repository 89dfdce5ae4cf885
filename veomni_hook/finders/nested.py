"""Targets that a config imports while it loads: served unpatched, and remembered.

Separate from `configs`, because every target is checked here and only a cache miss needs configs.
"""

from __future__ import annotations

import threading


class _Loading(threading.local):
    """Target modules that this thread imported while loading configs; None when it is loading none."""

    nested: list[str] | None = None


LOADING = _Loading()


def nested_import(fullname: str) -> bool:
    """Record a target that a config imports; return whether this thread is loading configs."""
    if LOADING.nested is None:
        return False
    LOADING.nested.append(fullname)
    return True

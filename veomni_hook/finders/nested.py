"""Targets that are imported from within a config while it loads: served unpatched, and remembered.

Apart from `configs`, because every target asks here and only a miss needs configs.
"""

from __future__ import annotations

import threading


class _Loading(threading.local):
    """Target modules that this thread imported while it loaded configs; None when it loads none."""

    nested: list[str] | None = None


LOADING = _Loading()


def nested_import(fullname: str) -> bool:
    """Note a target that is imported from within a config; true when this thread is loading configs."""
    if LOADING.nested is None:
        return False
    LOADING.nested.append(fullname)
    return True

"""Targets that a config imports while it loads: served unpatched and remembered, if a config may be for them.

Separate from `configs`, because every target is checked here and only a cache miss needs configs.
"""

from __future__ import annotations

import threading


class _Loading(threading.local):
    """Target modules that this thread imported while loading configs; None when it is loading none."""

    nested: list[str] | None = None


LOADING = _Loading()

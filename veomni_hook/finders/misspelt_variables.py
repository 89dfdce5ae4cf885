"""Misspelt environment variables: they have no effect, and a warning says so once per process.

Other projects also have variables that begin with ``VEOMNI_``; a variable counts as misspelt only if it is
within two edits of one of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from veomni_hook.errors import SettingsError
from veomni_hook.finders.log import warn_once
from veomni_hook.patches.code.nearest_names import distance, is_near_miss
from veomni_hook.settings import ENVIRONMENT

__all__ = ["meant", "report"]


def meant(variable: str) -> str:
    """Our variable within two edits of this one; empty if there is none."""
    near = [name for name in ENVIRONMENT.values() if is_near_miss(variable, name)]
    return min(near, key=lambda name: distance(variable, name), default="")


def report(unknown: Iterable[str], *, strict: bool) -> None:
    """Warn once per process about each misspelt variable that is set.

    Raises:
        SettingsError: in strict mode.
    """
    for variable in unknown:
        name = meant(variable) if os.environ.get(variable) else ""
        if name and strict:
            raise SettingsError(
                f"{variable} is not a variable of veomni-hook and has no effect",
                where="environment",
                fix=f"set {name}, or unset {variable}",
            )
        if name:
            warn_once(
                f"the environment variable {variable} is not a variable of veomni-hook and has no effect. "
                f"Fix: set {name} if you meant that"
            )

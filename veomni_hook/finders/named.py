"""Processing and configuration modules, which are targets only where a config names them.

Idioms do not look at them, so importing one costs a look at a set of names, which is usually empty.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from veomni_hook.finders.config_text import named_by
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.plugins import PATCHES, in_force

__all__ = ["is_named"]


def is_named(fullname: str) -> bool:
    """Whether the text of a config that the settings want names this module, or a pattern that matches it.

    Registered configs are not asked: `State.is_registered` knows their modules.
    """
    if STATE.named is None:
        settings = current_settings()
        announced = (point.value for point in in_force(PATCHES, settings.plugins))
        STATE.named = frozenset().union(*map(named_by, (*settings.patches, *announced)))
    return any(fnmatchcase(fullname, name) for name in STATE.named)

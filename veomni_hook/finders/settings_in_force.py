"""The settings in force: those of this process with what the activations ask for.

Misspelt environment variables have no effect, and a warning says so once per process. Other projects have
variables that begin with ``VEOMNI_``, too; one is misspelt only if it is within two edits of one of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from veomni_hook import plugins
from veomni_hook.errors import SettingsError
from veomni_hook.finders.log import warn, warn_once
from veomni_hook.finders.state import STATE
from veomni_hook.patches.code.nearest_names import distance, is_near_miss
from veomni_hook.settings import ENVIRONMENT, Settings, resolve

__all__ = ["current_settings", "meant"]


def current_settings() -> Settings:
    """The settings in force: resolved once per activation, at the first call."""
    if STATE.resolved is None:
        overrides: dict[str, object] = {}
        for settings in STATE.handles.values():
            overrides.update(settings)
        resolved = resolve(overrides=overrides)
        chosen, strict = resolved.settings.plugins, resolved.settings.strict
        plugins.choose(chosen, strict=strict)
        for name in plugins.unknown_names(chosen):
            what = f"the setting `plugins` names {name}, but no installed distribution or entry point has "
            what += "that name"
            if strict:
                raise SettingsError(what, where="VEOMNI_PLUGINS or the settings file", fix=plugins.NAMES_FIX)
            warn(f"{what}. Fix: {plugins.NAMES_FIX}")
        _report_misspelt(resolved.unknown_environment, strict=strict)
        STATE.resolved = resolved
    return STATE.resolved.settings


def meant(variable: str) -> str:
    """Our variable within two edits of this one; empty if there is none."""
    near = [name for name in ENVIRONMENT.values() if is_near_miss(variable, name)]
    return min(near, key=lambda name: distance(variable, name), default="")


def _report_misspelt(unknown: Iterable[str], *, strict: bool) -> None:
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

"""The settings in force: those of this process with what the activations ask for."""

from __future__ import annotations

from typing import Any

from veomni_hook import plugins
from veomni_hook.errors import SettingsError
from veomni_hook.finders import misspelt_variables
from veomni_hook.finders.log import warn
from veomni_hook.finders.state import STATE
from veomni_hook.settings import Settings, resolve

__all__ = ["current_settings"]


def current_settings() -> Settings:
    """The settings in force: resolved once per activation, at the first call."""
    if STATE.resolved is None:
        overrides: dict[str, Any] = {}
        for settings in STATE.handles.values():
            overrides.update(settings)
        resolved = resolve(overrides=overrides)
        _choose_plugins(resolved.settings)
        misspelt_variables.report(resolved.unknown_environment, strict=resolved.settings.strict)
        STATE.resolved = resolved
    return STATE.resolved.settings


def _choose_plugins(settings: Settings) -> None:
    plugins.choose(settings.plugins, strict=settings.strict)
    for name in plugins.unknown_names(settings.plugins):
        what = (
            f"the setting `plugins` names {name}, but no installed distribution or entry point has that name"
        )
        if settings.strict:
            raise SettingsError(what, where="VEOMNI_PLUGINS or the settings file", fix=plugins.NAMES_FIX)
        warn(f"{what}. Fix: {plugins.NAMES_FIX}")

"""What the finder does with a target: find upstream's spec, and return the patched form's spec for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from veomni_hook.errors import ConfigError
from veomni_hook.finders.applicable import config_names, is_builtin, registered_for
from veomni_hook.finders.config_text import half_imported
from veomni_hook.finders.loading_guard import LOADING, forget, unrecorded
from veomni_hook.finders.log import warn
from veomni_hook.finders.patched_form import patched_loader
from veomni_hook.finders.remote import patching
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import is_remote
from veomni_hook.locate import find_upstream

__all__ = ["find_patched"]


def find_patched(fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Return the spec for a target: the patched module's, or upstream's if nothing applies.

    None leaves the module to the finders behind ours: now it cannot be patched, and it is forgotten later.
    """
    STATE.asked.add(fullname)
    if LOADING.served is not None and not _only_built_in(fullname):
        LOADING.served.append(fullname)
        return None
    if waits_for := _half_imported(fullname):
        _wait(fullname, waits_for)
        return None
    spec = find_upstream(fullname, path, target)
    if spec is None:
        return None
    if is_remote(fullname):
        return patching(fullname, spec)
    with unrecorded():  # a config that loads may import a module that only built-in specs patch
        try:
            loader = patched_loader(fullname, spec)
        except ConfigError as error:
            if not error.waits_for or current_settings().strict:
                raise
            warn(
                f"{error.waits_for} imports {fullname}, and the configs for it need {error.waits_for}, which "
                "therefore has upstream's code of it; it is patched for what imports it later. Fix: import "
                f"{fullname} first, or let the configs name what they take from {error.waits_for} as a string"
            )
            _wait(fullname, error.waits_for)
            return None
    return spec if loader is None else loader.spec()


def _wait(fullname: str, module: str) -> None:
    """Serve a target unpatched until a module is imported completely, and then forget it."""
    spec: Any = sys.modules[module].__spec__
    STATE.unsettled[fullname] = module
    if not isinstance(spec, _Awaited):
        spec.__class__ = type("Awaited", (_Awaited, type(spec)), {})


class _Awaited:
    """Part of the class of a spec whose module is being imported. The import system says when that ends."""

    @property
    def _initializing(self) -> bool:
        return True

    @_initializing.setter
    def _initializing(self, running: bool) -> None:
        spec: Any = self
        spec.__class__ = type(self).__mro__[2]
        spec._initializing = running
        ready = [name for name, waits_for in STATE.unsettled.items() if waits_for == spec.name]
        for name in ready:  # first of all: what follows imports, too
            del STATE.unsettled[name]
        forget(ready)


def _only_built_in(fullname: str) -> bool:
    """Whether no config but ours may be for a target.

    Then configs that import it while they load get it patched, and it stays. Other modules keep its classes:
    a second `PreTrainedConfig`, or a second `AutoModel`, would not be the first one.
    """
    if registered_for(fullname):
        return False
    return all(map(is_builtin, config_names(fullname, current_settings())))


def _half_imported(fullname: str) -> str:
    """The module that a target's configs import and that is importing the target right now; usually empty.

    Neither the configs nor their code in the patched module could be imported now.
    """
    settings = current_settings()
    if not settings.patches:
        return ""
    return next(filter(None, map(half_imported, config_names(fullname, settings))), "")

"""`register`: patch configs that are added to this process.

A patched module is executed once. What is registered, or declared in a registered config, after that has no
effect on it: a warning with the remedy; an error if strict. The exception are classes that the config maps
(`veomni_hook.patches.mappings`).
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from types import ModuleType
from typing import Any

from veomni_hook.errors import AlreadyImportedError, AlreadyImportedWarning
from veomni_hook.finders import absent_modules, already_imported
from veomni_hook.finders.already_imported import families, is_patched
from veomni_hook.finders.applicable import config_names
from veomni_hook.finders.configs import as_configs
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import is_target
from veomni_hook.layout import shortened
from veomni_hook.patches.mappings import comes_late
from veomni_hook.patches.records import Patch, PatchType
from veomni_hook.patches.spec import PatchConfig

__all__ = ["register"]

_FIX = (
    "register the config, complete, above the first import of the models; in a notebook, restart the kernel "
    "first"
)


def register(config: PatchConfig | ModuleType | object) -> PatchConfig:
    """Add a patch config to this process; it applies to modules imported from now on.

    Args:
        config: a `PatchConfig` (ours or patchgen's), or a module that holds one as `config`.

    Returns:
        The config as the engine uses it.

    Raises:
        ConfigError: the object is not a patch config and holds none. Under `VEOMNI_STRICT=1` also if the
            config's source module is not installed, which is otherwise a warning.
        AlreadyImportedError: under `VEOMNI_STRICT=1`, a module that the config is for is already imported, a
            warning otherwise. Verbs of a registered config raise or warn, too, if they come too late.
    """
    configs = as_configs(config, where=repr(config))
    absent_modules.report([(added.name, added.source_module) for added in configs], registered=True)
    for added in configs:
        _report_late(added)
        _watch(added)
    STATE.registered = [*STATE.registered, *configs]
    others = [added for added in configs if not is_target(added.source_module)]
    STATE.registered_names |= {added.source_module for added in others if not added.is_pattern}
    STATE.registered_patterns += tuple(added.applies_to for added in others if added.is_pattern)
    already_imported.report(already_imported.modules_of(configs))
    return configs[0]


class _Declarations(list[Any]):
    """A list of a registered config: tells what is added to it."""

    def __init__(self, held: Iterable[object], added: Callable[[list[object]], None]) -> None:
        super().__init__(held)
        self._added = added

    def append(self, entry: object) -> None:
        super().append(entry)
        self._added([entry])

    def extend(self, entries: Iterable[object]) -> None:
        entries = list(entries)
        super().extend(entries)
        self._added(entries)

    def __iadd__(self, entries: Iterable[object]) -> _Declarations:  # type: ignore[misc]
        self.extend(entries)
        return self


def _report_late(config: PatchConfig) -> None:
    """Warn if modules were patched without ``config``, which is registered now.

    Raises:
        AlreadyImportedError: in strict mode.
    """
    original = config.adopted_from or config
    if any((known.adopted_from or known) is original for known in STATE.registered):
        return
    # Where settings or distributions name the config, it was in force.
    own = {config.name, config.name.partition(":")[0]}
    names = [name for name in _loaded(config) if own.isdisjoint(config_names(name, current_settings()))]
    if names:
        _tell(f"the config {config.name}", names, "registered", config.origin)


def _watch(config: PatchConfig) -> None:
    """Warn from now on if a verb of ``config``, which is registered, comes too late for a loaded module.

    Changes the lists of the config to lists that tell what is added to them.
    """
    for name, value in list(vars(config).items()):
        if type(value) is list:
            setattr(config, name, _Declarations(value, partial(_added, config)))


def _added(config: PatchConfig, entries: list[object]) -> None:
    loaded = _loaded(config)
    for entry in entries:
        if names := [name for name in loaded if _is_late(config, entry, name)]:
            what = (
                f"a {entry.patch_type.value} of {entry.target}" if isinstance(entry, Patch) else "an addition"
            )
            _tell(f"{what} in {config.name}", names, "declared", config.place_of(entry))


def _is_late(config: PatchConfig, entry: object, name: str) -> bool:
    module = sys.modules[name]
    if not isinstance(entry, Patch):
        return True
    if entry.patch_type is PatchType.CLASS_MAPPING:
        return comes_late(config, entry, module)
    return not config.is_pattern or _has_target(entry, module)


def _loaded(config: PatchConfig) -> list[str]:
    """The loaded, patched modules that the config is for, as far as their names tell."""
    names = list(sys.modules) if config.is_pattern else [config.source_module]
    modules = {name: sys.modules.get(name) for name in names if config.applies_to(name)}
    patched = [
        name for name, module in modules.items() if isinstance(module, ModuleType) and is_patched(module)
    ]
    if not patched or config.device not in (None, current_settings().device_kind()):
        return []
    if not (config.is_pattern and config.patches):
        return patched
    return [
        name for name in patched if any(_has_target(patch, sys.modules[name]) for patch in config.patches)
    ]


def _has_target(patch: Patch, module: ModuleType) -> bool:
    head = patch.target.partition(".")[0]
    return any(
        re.search(patch.target, name) if patch.regex else fnmatchcase(name, head) for name in vars(module)
    )


def _tell(what: str, names: list[str], happens: str, place: str) -> None:
    text = f"{what} has no effect on {shortened(families(names))}, which was imported before it was {happens}"
    if current_settings().strict:
        raise AlreadyImportedError(text, where=place, fix=_FIX)
    warnings.warn(f"{text} ({place}). Fix: {_FIX}", AlreadyImportedWarning, stacklevel=4)

"""Mappings of classes in patched modules that are loaded: they follow what their config declares later.

Light to import: the patch language imports it.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from veomni_hook.patches.records import Patch, PatchType

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from veomni_hook.patches.mapped import MappedClass
    from veomni_hook.patches.spec import PatchConfig

__all__ = ["CHANGED", "MAPPED", "comes_late", "follow", "follow_at_load", "holding"]

#: Every mapped class of the loaded patched modules, by module and name.
MAPPED: dict[tuple[str, str], MappedClass] = {}
#: By name, the configs that have taken a mapping back in this process. A module from the cache may be older.
CHANGED: dict[str, PatchConfig] = {}


def holding(config: PatchConfig, name: str) -> Patch | None:
    """Return the mapping of ``config`` that holds for the class ``name``.

    It is the one that a module imported now would get: a name has precedence over expressions and patterns,
    an earlier one of these over a later one.
    """
    meant = [
        patch
        for patch in config.patches
        if patch.patch_type is PatchType.CLASS_MAPPING and _is_meant(name, patch)
    ]
    exact = (patch for patch in meant if _names(patch, name))
    return next(exact, meant[0] if meant else None)


def comes_late(config: PatchConfig, patch: Patch, home: ModuleType) -> bool:
    """Whether a mapping that ``config`` declares now leaves a class of a loaded module as it is.

    Only the classes whose constructor calls ask already can follow. A target that was in force before is
    never late: classes that it did not map then, as those that are never constructed, are not meant.
    """
    asking = {mapped.name: mapped for mapped in _of(config) if mapped.home == home.__name__}
    if any(patch.target in mapped.targets for mapped in asking.values()):
        return False
    return any(
        name not in asking
        for name, kind in list(vars(home).items())
        if isinstance(kind, type) and kind.__module__ == home.__name__ and _is_meant(name, patch)
    )


def follow(config: PatchConfig, *, taken_back: bool) -> None:
    """Let the loaded classes that ``config`` maps follow a change of it.

    Args:
        config: the config.
        taken_back: whether the change took a mapping back. Otherwise, classes without a mapping are left as
            they are: a config module that is executed after its mappings came from the cache declares them
            one by one.
    """
    if taken_back:
        CHANGED[config.name] = config
    elif CHANGED.get(config.name) is not config:
        CHANGED.pop(config.name, None)  # an earlier config with this name, as of a notebook's cell
    for mapped in _of(config):
        patch = holding(config, mapped.name)
        if patch is not None or taken_back:
            mapped.map_to(patch)


def follow_at_load(mapped: MappedClass) -> None:
    """Let a class of a module that is just executed follow its config, if that has taken a mapping back."""
    config = CHANGED.get(mapped.config)
    if config is not None and config.applies_to(mapped.home):
        mapped.map_to(holding(config, mapped.name))


def _of(config: PatchConfig) -> Iterator[MappedClass]:
    name = config.name
    yield from (
        mapped for mapped in list(MAPPED.values()) if mapped.config == name and config.applies_to(mapped.home)
    )


def _is_meant(name: str, patch: Patch) -> bool:
    return bool(re.search(patch.target, name)) if patch.regex else fnmatchcase(name, patch.target)


def _names(patch: Patch, name: str) -> bool:
    return not patch.regex and patch.target == name

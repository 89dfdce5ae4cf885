"""What `PatchConfig.map_class` and `unmap_class` do to a config, and to the patched modules that are loaded.

A loaded module's mappings of classes follow what their config declares later. Light to import: the patch
language imports it.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Protocol

from veomni_hook.errors import ConfigError
from veomni_hook.patches.records import Patch, PatchType, place_of_caller

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

__all__ = [
    "CHANGED",
    "MAPPED",
    "comes_late",
    "follow",
    "holding",
    "mapping",
    "unmapping",
]


class Declares(Protocol):
    """What this file needs of a `PatchConfig`, which imports it."""

    patches: list[Patch]

    @property
    def name(self) -> str: ...

    def applies_to(self, module: str) -> bool: ...


class Follows(Protocol):
    """What this file needs of a `MappedClass`, which imports it."""

    name: str
    home: str
    config: str
    targets: set[str]
    replacements: dict[str, Any]

    def map_to(self, patch: Patch | None) -> None: ...


def mapping(
    config: Declares,
    target: str | re.Pattern[str],
    replacement: str | type | None,
    weights: str,
    description: str | None,
    *,
    overwrite: bool,
) -> Any:
    """Declare a mapping of a class, or return the decorator that does. See `PatchConfig.map_class`."""
    origin = place_of_caller()
    declared = _text(target)

    def register(mapped_to: Any) -> Any:
        named = (
            mapped_to if isinstance(mapped_to, str) else f"{mapped_to.__module__}:{mapped_to.__qualname__}"
        )
        for text in filter(None, (named, weights)):
            _check(text, declared, origin)
        _check_kind(mapped_to, declared, origin)
        before = [patch for patch in config.patches if _maps(patch, target)]
        if before and not overwrite:
            raise ConfigError(
                f"the config maps {declared!r} twice, to {before[0].replacement_source} and to {named}",
                where=f"{before[0].origin} and {origin} ({config.name})",
                fix="remove one of them, or pass overwrite=True to the second",
            )
        patch = Patch(
            PatchType.CLASS_MAPPING,
            declared,
            None,
            source_module=named.partition(":")[0],
            replacement_source=named.replace(":", "."),
            description=description or f"Construct {named} for {declared}",
            regex=isinstance(target, re.Pattern),
            weights=weights,
            origin=origin,
        )
        if before:  # its place decides which of several expressions holds
            config.patches[config.patches.index(before[0])] = patch
        else:
            config.patches.append(patch)
        follow(config, taken_back=False)
        return mapped_to

    return register if replacement is None else register(replacement)


def unmapping(config: Declares, target: str | re.Pattern[str] | None) -> None:
    """Take back a mapping, or all. See `PatchConfig.unmap_class`."""
    kept = [patch for patch in config.patches if not _maps(patch, target)]
    if target is not None and len(kept) == len(config.patches):
        declared = _text(target)
        raise ConfigError(
            f"the config maps no class as {declared!r}",
            where=f"unmap_class in {place_of_caller()} ({config.name})",
            fix="name the class or the expression as in map_class",
        )
    config.patches[:] = kept
    follow(config, taken_back=True)


def _maps(patch: Patch, target: str | re.Pattern[str] | None) -> bool:
    if patch.patch_type is not PatchType.CLASS_MAPPING:
        return False
    return target is None or (patch.target, patch.regex) == (_text(target), isinstance(target, re.Pattern))


def _text(target: str | re.Pattern[str]) -> str:
    return target.pattern if isinstance(target, re.Pattern) else target


def _check(text: str, declared: str, origin: str) -> None:
    module, colon, name = text.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"{text!r} in map_class({declared!r}) is not of the form package.module:Name",
            where=origin,
            fix="name something at the top level of a module that can be imported",
        )


def _check_kind(replacement: object, declared: str, origin: str) -> None:
    """Raise if a replacement that is imported already is no class of modules."""
    kind = replacement
    if isinstance(replacement, str):
        module, _, name = replacement.partition(":")
        loaded = sys.modules.get(module)
        whole = not getattr(getattr(loaded, "__spec__", None), "_initializing", False)
        kind = vars(loaded).get(name) if loaded is not None and whole else None
    torch = sys.modules.get("torch.nn")  # whatever subclasses its Module has imported it
    if kind is None or (isinstance(kind, type) and torch is not None and issubclass(kind, torch.Module)):
        return
    raise ConfigError(
        f"{replacement!r}, to which map_class({declared!r}) maps, is no subclass of torch.nn.Module",
        where=origin,
        fix="map the class to a class of modules",
    )


#: Every mapped class of the loaded patched modules, by module and name.
MAPPED: dict[tuple[str, str], Follows] = {}
#: By name, the configs that have taken a mapping back in this process. A module from the cache may be older.
CHANGED: dict[str, Declares] = {}


def holding(config: Declares, name: str) -> Patch | None:
    """Return the mapping of ``config`` that holds for the class ``name``.

    It is the one that a module imported now would get: a name has precedence over expressions and patterns,
    an earlier one of these over a later one.
    """
    mappings = (patch for patch in config.patches if patch.patch_type is PatchType.CLASS_MAPPING)
    meant = [patch for patch in mappings if patch.is_for(name)]
    exact = (patch for patch in meant if not patch.regex and patch.target == name)
    return next(exact, meant[0] if meant else None)


def comes_late(config: Declares, patch: Patch, home: ModuleType) -> bool:
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
        if isinstance(kind, type) and kind.__module__ == home.__name__ and patch.is_for(name)
    )


def follow(config: Declares, *, taken_back: bool) -> None:
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


def _of(config: Declares) -> Iterator[Follows]:
    name = config.name
    yield from (
        mapped for mapped in list(MAPPED.values()) if mapped.config == name and config.applies_to(mapped.home)
    )

"""What `PatchConfig.map_class` and `unmap_class` do to a config."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import ConfigError
from veomni_hook.patches.live_mappings import follow
from veomni_hook.patches.places import place_of_caller
from veomni_hook.patches.records import Patch, PatchType

if TYPE_CHECKING:
    from veomni_hook.patches.spec import PatchConfig

__all__ = ["mapped", "mapping", "unmapping"]


def mapping(
    config: PatchConfig,
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

    def register(given: Any) -> Any:
        named = given if isinstance(given, str) else f"{given.__module__}:{given.__qualname__}"
        for text in filter(None, (named, weights)):
            _check(text, declared, origin)
        _check_kind(given, declared, origin)
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
        return given

    return register if replacement is None else register(replacement)


def mapped(config: PatchConfig) -> dict[str, str]:
    """What a config maps. See `PatchConfig.mapped_classes`."""
    return {
        patch.target: f"{patch.source_module}:{(patch.replacement_source or '').rpartition('.')[2]}"
        for patch in config.patches
        if patch.patch_type is PatchType.CLASS_MAPPING
    }


def unmapping(config: PatchConfig, target: str | re.Pattern[str] | None) -> None:
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


def _check_kind(replacement: Any, declared: str, origin: str) -> None:
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

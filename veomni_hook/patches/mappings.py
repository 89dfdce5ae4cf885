"""What `PatchConfig.map_class` and `unmap_class` do to a config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import ConfigError
from veomni_hook.patches.live_mappings import follow
from veomni_hook.patches.places import place_of_caller
from veomni_hook.patches.records import Patch, PatchType

if TYPE_CHECKING:
    from veomni_hook.patches.spec import PatchConfig

__all__ = ["mapping", "unmapping"]


def mapping(
    config: PatchConfig,
    target: str | re.Pattern[str],
    replacement: str | type | None,
    weights: str,
    description: str | None,
) -> Any:
    """Declare a mapping of a class, or return the decorator that does. See `PatchConfig.map_class`."""
    origin = place_of_caller()
    declared = _text(target)

    def register(given: Any) -> Any:
        named = given if isinstance(given, str) else f"{given.__module__}:{given.__qualname__}"
        for text in filter(None, (named, weights)):
            _check(text, declared, origin)
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
        config.patches.append(patch)
        follow(config, taken_back=False)
        return given

    return register if replacement is None else register(replacement)


def unmapping(config: PatchConfig, target: str | re.Pattern[str]) -> None:
    """Take back a mapping. See `PatchConfig.unmap_class`."""
    declared = _text(target)
    kept = [p for p in config.patches if p.patch_type is not PatchType.CLASS_MAPPING or p.target != declared]
    if len(kept) == len(config.patches):
        raise ConfigError(
            f"the config maps no class as {declared!r}",
            where=f"unmap_class in {place_of_caller()} ({config.name})",
            fix="name the class or the expression as in map_class",
        )
    config.patches[:] = kept
    follow(config, taken_back=True)


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

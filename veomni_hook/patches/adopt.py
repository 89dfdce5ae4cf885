"""Convert configs made with the patchgen package into ours.

They are recognised by class and attribute names, never by isinstance: VeOmni re-exports patchgen under its
own names. The result is ``lenient``: it follows patchgen's rules where they differ from ours (an override of
a missing method adds it).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import copy
from types import ModuleType
from typing import Any

from veomni_hook.errors import ConfigError
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.records import device_of
from veomni_hook.patches.spec import ImportSpec, Patch, PatchConfig, PatchType, PositionedHelper

__all__ = ["adopt", "adopt_helper", "adopt_patch", "is_patch_config"]

_NEEDED = ("source_module", "patches", "additional_imports", "helpers", "exclude")


def is_patch_config(candidate: object) -> bool:
    """Whether ``candidate`` is one of our configs, or looks like a patchgen config."""
    if isinstance(candidate, PatchConfig):
        return True
    named = any(kind.__name__ == "PatchConfig" for kind in type(candidate).__mro__)
    return named and all(hasattr(candidate, name) for name in _NEEDED)


def adopt(config: Any, label: str = "") -> PatchConfig:
    """Return ``config`` itself if it is ours, else one of our configs with the current content of ``config``.

    A config made for patchgen is not changed, and later additions to it have no effect: VeOmni's config for
    another device may take the object, and change it.

    Args:
        config: the config.
        label: its ``module:name``; by default, where it is found to be bound.

    Raises:
        ConfigError: ``config`` is not a patch config, or holds a patch of an unknown type.
    """
    if isinstance(config, PatchConfig):
        return (
            _copied(config, label or config.name)
            if config.lenient and config.adopted_from is None
            else config
        )
    if not is_patch_config(config):
        raise ConfigError(
            f"{type(config).__name__} object is not a patch config",
            where=f"{type(config).__module__}.{type(config).__qualname__}",
            fix="pass a veomni_hook.PatchConfig, or one made with the patchgen package",
        )
    label = label or _label(config)
    return PatchConfig(
        source_module=config.source_module,
        target_file=getattr(config, "target_file", "patched_modeling.py"),
        description=getattr(config, "description", ""),
        patches=[adopt_patch(patch, label) for patch in config.patches],
        additional_imports=[
            ImportSpec(spec.module, list(spec.names or ()) or None, spec.alias, spec.is_from_import)
            for spec in config.additional_imports
        ],
        post_import_blocks=list(getattr(config, "post_import_blocks", ())),
        helpers=list(config.helpers),
        positioned_helpers=[adopt_helper(helper) for helper in getattr(config, "positioned_helpers", ())],
        drop_imported_names=set(getattr(config, "drop_imported_names", ())),
        exclude=list(config.exclude),
        transformers_version=getattr(config, "transformers_version", None),
        origin=label,
        label=label,
        adopted_from=config,
        lenient=True,
    )


def _copied(config: PatchConfig, label: str) -> PatchConfig:
    """Return a copy with the present content; its device is that of the present `target_file`."""
    duplicate = copy(config)
    for name, value in vars(config).items():
        if isinstance(value, list | set | dict) and name != "_namespace":
            setattr(duplicate, name, copy(value))
    duplicate.device = device_of(config.target_file) or config.device
    duplicate.label, duplicate.adopted_from = label, config
    return duplicate


def adopt_patch(patch: Any, label: str) -> Patch:
    """Return ``patch`` itself if it is ours, else one of our patches with the same content.

    Raises:
        ConfigError: its type is unknown; the message names the config ``label``.
    """
    if isinstance(patch, Patch):
        return patch
    value = getattr(patch.patch_type, "value", patch.patch_type)
    known = [kind.value for kind in PatchType]
    if value not in known:
        raise ConfigError(
            f"patch of unknown type {value!r} on {patch.target}",
            where=f"config {label}",
            fix=f"use one of {listed(known)}",
        )
    return Patch(
        PatchType(value),
        patch.target,
        patch.replacement,
        source_module=getattr(patch, "source_module", None),
        description=getattr(patch, "description", None),
        replacement_source=getattr(patch, "replacement_source", None),
        name_map=getattr(patch, "name_map", None),
    )


def adopt_helper(helper: Any) -> PositionedHelper:
    """Return one of our positioned helpers with the content of ``helper``."""
    return PositionedHelper(helper.target, helper.helper, getattr(helper, "placement", "after"))


def _label(config: Any) -> str:
    """``module:name`` of a config that does not record where it was made: where it is bound."""
    makers = dict.fromkeys(
        getattr(thing, "__module__", "")
        for thing in (*(p.replacement for p in config.patches), *config.helpers)
    )
    likely = [(name, sys.modules[name]) for name in makers if name in sys.modules]
    bound = next(_bindings(config, likely), None)
    # A module that only imports the config may use any name; its own module calls it `config` by convention.
    bound = bound or min(
        _bindings(config, sorted(sys.modules.items())),
        key=lambda name: (not name.endswith(":config"), name),
        default=None,
    )
    return bound or f"{type(config).__module__}:{getattr(config, 'target_file', 'config')}"


def _bindings(config: object, modules: list[tuple[str, ModuleType]]) -> Iterator[str]:
    for module_name, module in modules:
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is config:
                    yield f"{module_name}:{name}"

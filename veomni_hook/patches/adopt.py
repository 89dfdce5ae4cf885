"""Configs that the patchgen package made, turned into ours.

They are recognised by the names of their class and attributes, never by isinstance: patchgen need not be
installed, and VeOmni re-exports it under names of its own. What is lenient for them (a missing method that is
overridden is added) hangs on ``adopted_from``, which only this module sets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from veomni_hook.errors import ConfigError
from veomni_hook.patches.spec import ImportSpec, Patch, PatchConfig, PatchType, PositionedHelper
from veomni_hook.patches.text.names import listed

__all__ = ["adopt", "adopt_helper", "adopt_patch", "is_patch_config"]

_NEEDED = ("source_module", "patches", "additional_imports", "helpers", "exclude")


def is_patch_config(found: object) -> bool:
    """Whether ``found`` is a config of ours, or an object that looks like one of patchgen's."""
    if isinstance(found, PatchConfig):
        return True
    named = any(kind.__name__ == "PatchConfig" for kind in type(found).__mro__)
    return named and all(hasattr(found, name) for name in _NEEDED)


def adopt(found: Any) -> PatchConfig:
    """Return ``found`` itself if it is ours, else a config of ours with what patchgen's holds now.

    ``found`` is not changed, and what is added to it later is not seen.

    Raises:
        ConfigError: ``found`` is no patch config, or holds a patch that patchgen does not know.
    """
    if isinstance(found, PatchConfig):
        return found
    if not is_patch_config(found):
        raise ConfigError(
            f"{type(found).__name__} object is not a patch config",
            where=f"{type(found).__module__}.{type(found).__qualname__}",
            fix="pass a veomni_hook.PatchConfig, or one made with the patchgen package",
        )
    label = _label(found)
    return PatchConfig(
        source_module=found.source_module,
        target_file=getattr(found, "target_file", "patched_modeling.py"),
        description=getattr(found, "description", ""),
        patches=[adopt_patch(patch, label) for patch in found.patches],
        additional_imports=[_import(spec) for spec in found.additional_imports],
        post_import_blocks=list(getattr(found, "post_import_blocks", ())),
        helpers=list(found.helpers),
        positioned_helpers=[adopt_helper(helper) for helper in getattr(found, "positioned_helpers", ())],
        drop_imported_names=set(getattr(found, "drop_imported_names", ())),
        exclude=list(found.exclude),
        transformers_version=getattr(found, "transformers_version", None),
        origin=label,
        label=label,
        adopted_from=found,
    )


def adopt_patch(patch: Any, label: str) -> Patch:
    """Return a patch of ours with what ``patch`` holds, or ``patch`` itself if it is ours.

    Raises:
        ConfigError: its type is unknown; names the config ``label``.
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


def _import(spec: Any) -> ImportSpec:
    names = list(spec.names) if spec.names else None
    return ImportSpec(spec.module, names, spec.alias, spec.is_from_import)


def adopt_helper(helper: Any) -> PositionedHelper:
    """Return a positioned helper of ours with what ``helper`` holds."""
    return PositionedHelper(helper.target, helper.helper, getattr(helper, "placement", "after"))


def _label(found: Any) -> str:
    """``module:name`` of a config that does not know where it was made: where it is bound."""
    makers = dict.fromkeys(
        getattr(thing, "__module__", "")
        for thing in (*(p.replacement for p in found.patches), *found.helpers)
    )
    likely = [(name, sys.modules[name]) for name in makers if name in sys.modules]
    bound = next(_bindings(found, likely), None)
    # A module that only imports the config may call it anything; its maker calls it `config` by convention.
    bound = bound or min(
        _bindings(found, sorted(sys.modules.items())),
        key=lambda name: (not name.endswith(":config"), name),
        default=None,
    )
    return bound or f"{type(found).__module__}:{getattr(found, 'target_file', 'config')}"


def _bindings(found: object, modules: list[tuple[str, ModuleType]]) -> Iterator[str]:
    for module_name, module in modules:
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is found:
                    yield f"{module_name}:{name}"

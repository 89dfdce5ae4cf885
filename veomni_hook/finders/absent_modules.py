"""Configs for modules that are not installed: they patch nothing, and a warning says so once per process.

Configs are loaded only on a cache miss, so the result is stored with the cache entry (`Absent`), and a hit
checks only these again. Nothing is imported for this.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import chain

from veomni_hook.errors import ConfigError
from veomni_hook.finders.config_text import is_named
from veomni_hook.finders.log import warn_once
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.targets import SHARED, is_remote, is_target, is_target_if_named
from veomni_hook.locate import locate
from veomni_hook.patches.records import is_pattern
from veomni_hook.patches.spec import PatchConfig

__all__ = ["Absent", "absent", "problem", "report"]

#: The name of a config, and its source module, which is not installed.
Absent = tuple[str, str]

_OWN = "veomni_hook."
_MODELS = "transformers.models"
_FIX = "correct its source_module, or remove the config"


def absent(configs: Iterable[PatchConfig]) -> list[Absent]:
    """The configs that match no installed module; built-in ones may be for other releases."""
    named = dict.fromkeys((config.name, config.source_module) for config in configs)
    return [(name, module) for name, module in named if not name.startswith(_OWN) and problem(module)]


def report(configs: Iterable[Absent], *, registered: bool = False) -> None:
    """Warn once per process about each of these configs that still matches no installed module.

    Raises:
        ConfigError: in strict mode.
    """
    for name, module in configs:
        why = problem(module, registered=registered)
        if why and current_settings().strict:
            raise ConfigError(why, where=f"config {name}", fix=_FIX)
        if why:
            warn_once(f"the config {name} patches nothing: {why}. Fix: {_FIX}")


def problem(source_module: str, *, registered: bool = False) -> str:
    """Why a config for this module or pattern applies to nothing; empty if it applies or if unknown.

    Args:
        source_module: a module's name, or a pattern.
        registered: whether the config is registered in this process; others can patch only transformers.
    """
    # The package that contains everything a name or pattern can match; empty if it can be anywhere.
    head = re.split(r"[*?\[]", source_module, maxsplit=1)[0].rpartition(".")[0]
    if is_remote(f"{head}.") or (is_pattern(source_module) and not head):
        return ""  # unknown which modules of remote code there will be
    if is_pattern(source_module):
        known = [*SHARED, *(sys.modules if registered else ())]
        if any(fnmatchcase(name, source_module) for name in chain(known, _candidates(head))):
            return ""
    elif source_module in sys.modules or locate(source_module) is not None:
        beside = is_target_if_named(source_module)
        if registered or is_target(source_module) or (beside and is_named(source_module)):
            return ""
        told = "is not a modeling module of transformers; another module is patched only if "
        told += "veomni_hook.register(config) is called before it is imported"
        if beside:
            told = "is patched only where the text of a config has this name as one string"
        return f"{source_module} {told}"
    while head and not any(map(os.path.isdir, _folders(head))):
        head = head.rpartition(".")[0]  # the nearest parent that is installed
    near = difflib.get_close_matches(source_module, list(_candidates(head)))
    told = f"; nearest: {', '.join(near)}" if near else ""
    return f"no installed module matches {source_module}{told}"


def _candidates(package: str) -> Iterator[str]:
    """Installed modules below a package; for transformers or no package, modules of its models."""
    if not package or package in _MODELS:
        package = _MODELS
    of_models = f"{package}.".startswith(f"{_MODELS}.")
    for name in _below(package):
        if not of_models or is_target(name) or is_target_if_named(name):
            yield name


def _below(package: str) -> Iterator[str]:
    for root in _folders(package):
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if name.isidentifier() and name != "__pycache__")
            inner = os.path.relpath(folder, root).replace(os.sep, ".")
            above = package if inner == "." else f"{package}.{inner}"
            for name in sorted(files):
                stem, extension = os.path.splitext(name)
                if extension == ".py":
                    yield above if stem == "__init__" else f"{above}.{stem}"


def _folders(package: str) -> list[str]:
    """The folders of a package, possibly a namespace package; empty if it is not installed."""
    spec = locate(package)
    if spec is None:
        return []
    inner = package.removeprefix(spec.name).strip(".").split(".")
    return [os.path.join(folder, *inner) for folder in spec.submodule_search_locations or ()]

"""Finding a module as the import system would without this hook; `locate` imports no package for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["find_upstream", "locate"]

_OURS = ("veomni_hook.finders.finder", "veomni_hook.finders.patchgen")


def find_upstream(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """Return what the import system would find without this hook."""
    # Ask every other finder in turn, not only PathFinder: editable installs and other hooks have their own.
    for finder in list(sys.meta_path):
        if type(finder).__module__ in _OURS:
            continue
        spec = finder.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None


def locate(module: str) -> ModuleSpec | None:
    """Find a module's upstream spec without importing its packages."""
    spec: ModuleSpec | None = None
    search: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        try:
            spec = find_upstream(".".join(parts[:depth]), search)
        except KeyError:  # a namespace package: its path asks for its parent in sys.modules
            search = [
                path for base in search or () if os.path.isdir(path := os.path.join(base, parts[depth - 1]))
            ]
            spec = ModuleSpec(".".join(parts[:depth]), None, is_package=True)
            spec.submodule_search_locations = search
            continue
        if spec is None:
            return None
        search = spec.submodule_search_locations
        if search is None and depth < len(parts):
            return None
    return spec

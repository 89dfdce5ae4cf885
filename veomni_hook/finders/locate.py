"""Finding a module's file without importing its packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

from veomni_hook.finders.finder import PatchFinder


def locate(module: str) -> ModuleSpec | None:
    """Find a module's upstream spec without importing its packages."""
    spec: ModuleSpec | None = None
    search: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        try:
            spec = _find(".".join(parts[:depth]), search)
        except KeyError:  # a namespace package: its path asks for its parent in sys.modules
            search = [
                path for base in search or () if os.path.isdir(path := os.path.join(base, parts[depth - 1]))
            ]
            continue
        if spec is None:
            return None
        search = spec.submodule_search_locations
        if search is None and depth < len(parts):
            return None
    return spec


def _find(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if isinstance(finder, PatchFinder):
            continue
        spec = finder.find_spec(name, search)
        if spec is not None:
            return spec
    return None

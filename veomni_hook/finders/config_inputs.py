"""What configs were made from: the files to watch, and a digest for configs without their own file.

The cache trusts an entry only while every file listed here is unchanged. These are the config's own module,
the files of its replacements, and the modules that it imports outside the standard library, transformers and
torch (names and tables are often kept in a sibling module). The engine digest covers the built-in specs.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from veomni_hook.cache.key import file_digest
from veomni_hook.finders.configs import Loaded
from veomni_hook.finders.locate import locate
from veomni_hook.patches.spec import PatchConfig

# Pinned by their versions in the key, or by the engine digest.
_PINNED = ("transformers", "torch", "veomni_hook", "numpy")


def input_files(loaded: Iterable[Loaded]) -> dict[str, str]:
    """Return the digest of every file that these configs were read from, by path."""
    paths: set[str] = set()
    for config_module in loaded:
        paths.update(_module_files(config_module.module, set()))
        for config in config_module.configs:
            paths.update(_replacement_files(config))
    return {path: file_digest(path) for path in sorted(paths)}


def config_digest(config: PatchConfig) -> str:
    """Return a digest of a config that was registered in this process, from its source text."""
    state = hashlib.blake2b(digest_size=16)
    for part in _texts(config):
        state.update(part.encode())
        state.update(b"\0")
    return state.hexdigest()


def _texts(value: Any) -> Iterator[str]:
    """The value as text, field by field: objects as their source, everything else as its repr."""
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__ if name != "origin"}
        yield from _texts({"": type(value).__name__, **fields})
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key)
            yield from _texts(value[key])
    elif isinstance(value, set | frozenset):
        yield from sorted(str(item) for item in value)
    elif isinstance(value, list | tuple):
        yield str(len(value))
        for item in value:
            yield from _texts(item)
    elif inspect.isroutine(value) or inspect.isclass(value):
        yield f"{value.__module__}.{value.__qualname__}"
        yield _source(value)
    else:
        yield repr(value)


def _source(definition: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(definition))
    except (OSError, TypeError):
        return ""  # the engine raises ReplacementError when it needs this source


def _replacement_files(config: PatchConfig) -> Iterator[str]:
    objects = [patch.replacement for patch in config.patches]
    objects += [*config.helpers, *(positioned.helper for positioned in config.positioned_helpers)]
    for definition in objects:
        module = sys.modules.get(getattr(definition, "__module__", None) or "")
        if module is not None and _watched(module):
            yield from _file(module)
    for patch in config.patches:
        if patch.replacement_source:
            # By its spec: an entry must become stale when the package is removed, too.
            spec = locate(patch.replacement_source.rpartition(".")[0])
            path = spec.origin if spec is not None else None
            if path and path.endswith(".py") and patch.replacement_source.partition(".")[0] not in _PINNED:
                yield os.path.abspath(path)


def _module_files(module: ModuleType, seen: set[str]) -> Iterator[str]:
    """The files of the module and its direct imports; recursively for modules in the same package."""
    if module.__name__ in seen:
        return
    seen.add(module.__name__)
    if not _watched(module):
        return
    yield from _file(module)
    for name in _imports(module):
        imported = sys.modules.get(name)
        if imported is None or not _watched(imported):
            continue
        if name.rpartition(".")[0] == module.__name__.rpartition(".")[0]:
            yield from _module_files(imported, seen)
        else:
            yield from _file(imported)


def _imports(module: ModuleType) -> Iterator[str]:
    for path in _file(module):
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
        package = module.__package__ or ""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = package.split(".")
                    base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _file(module: ModuleType) -> Iterator[str]:
    path = getattr(module, "__file__", None)
    if path and path.endswith(".py") and os.path.isfile(path):
        yield os.path.abspath(path)


def _watched(module: ModuleType) -> bool:
    top = module.__name__.partition(".")[0]
    if top in _PINNED or top in sys.stdlib_module_names:
        return False
    return bool(getattr(module, "__file__", None))

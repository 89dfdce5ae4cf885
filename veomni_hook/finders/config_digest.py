"""A digest of everything that the engine reads from a config: its fields, and the source of its replacements.

It is in the key of configs that were registered in this process, and of those that were loaded from modules.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator
from contextlib import suppress

from veomni_hook.cache.inputs import observe, origin
from veomni_hook.errors import ReplacementError
from veomni_hook.patches.code.snippet import read_snippet
from veomni_hook.patches.spec import PatchConfig

__all__ = ["config_digest"]

#: Fields that say where a config comes from, and nothing of what it does.
_PROVENANCE = ("origin", "adopted_from")


def config_digest(config: PatchConfig) -> str:
    """Return a digest of a config."""
    state = hashlib.blake2b(digest_size=16)
    for part in _texts(config):
        state.update(part.encode())
        state.update(b"\0")
    return state.hexdigest()


def _texts(value: object) -> Iterator[str]:
    """The value as text, field by field: objects as their source, everything else as its repr."""
    if hasattr(value, "__dataclass_fields__"):
        names = [name for name in value.__dataclass_fields__ if name not in _PROVENANCE]
        # A config's name is written into modules, although it is no field.
        fields = {name: getattr(value, name) for name in [*names, "name"] if hasattr(value, name)}
        yield from _texts({"": type(value).__name__, **fields})
        if source := getattr(value, "replacement_source", None):
            # The engine looks whether the module has the name; it imports nothing.
            yield observe("file", origin(source.rpartition(".")[0]))
    elif isinstance(value, dict):
        yield from _texts([part for key in sorted(value, key=str) for part in (str(key), value[key])])
    elif isinstance(value, set | frozenset):
        yield from sorted(str(item) for item in value)
    elif isinstance(value, list | tuple):
        yield str(len(value))
        for item in value:
            yield from _texts(item)
    elif isinstance(value, property | functools.cached_property):
        yield from _texts([getattr(value, name, None) for name in ("fget", "fset", "fdel", "func")])
    elif inspect.isroutine(value) or inspect.isclass(value):
        yield f"{value.__module__}.{value.__qualname__}"
        with suppress(ReplacementError):  # the engine raises it when it needs this source
            snippet = read_snippet(value, where="")
            yield snippet.comments
            yield snippet.document.source
    else:
        yield repr(value)

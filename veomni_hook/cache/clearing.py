"""`clear`: remove entries that no running process uses.

An entry is locked exclusively, moved aside atomically and only then deleted, so no reader sees half of it.
Only what `inventory` recognises as part of the cache, and leftovers of killed writers, are removed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from veomni_hook.cache import entry, lease
from veomni_hook.cache.inventory import (
    TRASH_PREFIX,
    Finding,
    Result,
    entries_of,
    is_kind,
    manifests_of,
    names_in,
    open_root,
    size_of,
)
from veomni_hook.cache.trusted_folder import Root

__all__ = ["ClearResult", "clear"]

_ABANDONED_AFTER = 3600.0  # seconds; a writer takes milliseconds between creating and renaming its file


@dataclass
class ClearResult(Result):
    """Paths of `removed` entries, `manifests` removed, `freed` bytes; the rest is `in_use` or `failed`."""

    removed: tuple[str, ...] = ()
    manifests: int = 0
    freed: int = 0
    in_use: tuple[Finding, ...] = ()
    failed: tuple[Finding, ...] = ()


def clear(folder: str, *, force: bool = False) -> ClearResult:
    """Remove each entry of a folder that no running process uses (`force`: all), its manifests and leftovers.

    Raises CacheError when the folder cannot be trusted.
    """
    root = open_root(folder)
    if root is None:
        return ClearResult(folder)
    with root:
        clearing = ClearResult(root.path)
        manifests = manifests_of(root)
        for name in entries_of(root, manifests.values()):
            _remove_entry(root, name, clearing, force=force)
        for key, manifest in manifests.items():
            # An entry that still exists was kept, or published again in the meantime.
            kept = (
                isinstance(manifest, entry.Manifest)
                and bool(manifest.patch_hash)
                and is_kind(root, manifest.entry, stat.S_ISDIR)
            )
            if not kept:
                clearing.manifests += _remove_file(root, f"{entry.KEYS}/{key}", clearing)
        _remove_leftovers(root, manifests, clearing)
        return clearing


def _remove_entry(root: Root, name: str, clearing: ClearResult, *, force: bool) -> None:
    release = name.partition("/")[0]
    size = size_of(root, name)
    descriptor = None
    try:
        if is_kind(root, release, stat.S_ISLNK):
            root.unlink(release)  # remove the link only: it leads to a folder outside the cache
        elif is_kind(root, name, stat.S_ISDIR):
            descriptor = None if force else lease.claim(root, name)
            aside = f"{TRASH_PREFIX}{os.urandom(8).hex()}"
            root.rename(name, aside)
            _remove_tree(root, aside, clearing)
        elif not is_kind(root, name, bool):
            return  # a manifest names it, but it is gone
        else:
            root.unlink(name)
    except lease.InUse as in_use:
        clearing.in_use += (Finding(root.full(name), str(in_use)),)
        return
    except (FileNotFoundError, IsADirectoryError):
        return  # another `clear` was faster, and the entry may have been published again since
    except OSError as error:
        clearing.failed += (Finding(root.full(name), error.strerror or str(error)),)
        return
    finally:
        if descriptor is not None:
            os.close(descriptor)
    clearing.removed += (root.full(name),)
    clearing.freed += size


def _remove_tree(root: Root, name: str, clearing: ClearResult) -> None:
    try:
        root.remove_tree(name)
    except FileNotFoundError:
        return  # another `clear` takes the same leftover apart
    except OSError as error:
        clearing.failed += (Finding(root.full(name), error.strerror or str(error)),)


def _remove_file(root: Root, name: str, clearing: ClearResult) -> bool:
    size = size_of(root, name)
    try:
        root.unlink(name)
    except FileNotFoundError:
        return False
    except OSError as error:
        clearing.failed += (Finding(root.full(name), error.strerror or str(error)),)
        return False
    clearing.freed += size
    return True


def _remove_leftovers(root: Root, manifests: Collection[str], clearing: ClearResult) -> None:
    for name in names_in(root, entry.KEYS):
        path = f"{entry.KEYS}/{name}"
        age = 0.0
        with suppress(OSError):
            age = time.time() - root.status(path).st_mtime
        if name not in manifests and age > _ABANDONED_AFTER:
            _remove_file(root, path, clearing)
    for name in root.names():
        if name.startswith(TRASH_PREFIX):
            clearing.freed += size_of(root, name)
            _remove_tree(root, name, clearing)
    releases = {
        place.partition("/")[0] for place in (os.path.relpath(path, root.path) for path in clearing.removed)
    }
    for name in [*releases, entry.KEYS]:
        try:
            root.rmdir(name)
        except OSError:
            continue  # it contains something else, or a writer was faster

"""The cache as the command line shows it: `info` and `verify`, with typed results; both are read-only.

The folder may also contain other things. Only the files under ``keys``, and folders that a manifest names or
that hold a lock file, belong to the cache.
"""

from __future__ import annotations

import stat
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from veomni_hook.cache import entry, lease
from veomni_hook.cache.inputs import check_inputs
from veomni_hook.cache.key import interpreter_tag
from veomni_hook.cache.trusted_folder import TEMPORARY_SUFFIX, Defect, Root, Vanished, write_problem
from veomni_hook.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "TRASH_PREFIX",
    "CacheInfo",
    "EntryInfo",
    "Finding",
    "Result",
    "VerifyResult",
    "entries_of",
    "info",
    "is_kind",
    "manifests_of",
    "names_in",
    "open_root",
    "size_of",
    "verify",
]

TRASH_PREFIX = ".removed-"  # of entries that `clear` has moved aside


@dataclass(frozen=True)
class EntryInfo:
    """One patched module for one key; `size` counts its text and bytecode in bytes."""

    module: str
    distribution: str
    version: str
    patch_hash: str
    interpreter: str
    path: str
    size: int
    key: str


@dataclass(frozen=True)
class Finding:
    """A path and its problem."""

    path: str
    reason: str


@dataclass
class Result:
    """Base of the results: what was found in the folder `root`."""

    root: str

    def to_dict(self) -> dict[str, object]:
        """The result as JSON types."""
        return asdict(self)


@dataclass
class CacheInfo(Result):
    """What the cache holds: total `size` in bytes, and `unpatched` modules known to need no patch."""

    mode: str
    reason: str
    exists: bool
    writable: bool
    size: int = 0
    unpatched: int = 0
    damaged: int = 0
    entries: tuple[EntryInfo, ...] = ()


@dataclass
class VerifyResult(Result):
    """`defects` are entries that no import will use; `stale` ones depend on a config that has changed.

    `leftovers` are paths that belong to no manifest; `clear` removes them.
    """

    checked: int = 0
    defects: tuple[Finding, ...] = ()
    stale: tuple[Finding, ...] = ()
    leftovers: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is defective."""
        return not self.defects


def info(folder: str, mode: str, reason: str) -> CacheInfo:
    """Return what a cache folder holds; raises CacheError when it cannot be trusted.

    Args:
        folder: its path; empty for a cache without a folder.
        mode: the store's `mode`, for the result.
        reason: the store's `reason`, for the result.
    """
    root = open_root(folder)
    if root is None:
        return CacheInfo(folder, mode, reason, exists=False, writable=False)
    with root:
        manifests = manifests_of(root)
        good = [item for item in manifests.values() if isinstance(item, entry.Manifest)]
        own = [item for item in good if not item.inputs]  # the others repeat one of these
        patched = [item for item in own if item.patch_hash]
        places = [*entries_of(root, good), *(f"{entry.KEYS}/{name}" for name in names_in(root, entry.KEYS))]
        return CacheInfo(
            folder,
            mode,
            reason,
            exists=True,
            writable=not write_problem(folder),
            size=sum(size_of(root, place) for place in places),
            unpatched=len(own) - len(patched),
            damaged=len(manifests) - len(good),
            entries=tuple(_describe(root, item) for item in patched),
        )


def verify(folder: str) -> VerifyResult:
    """Check every manifest, text and bytecode; raises CacheError when the folder cannot be trusted."""
    root = open_root(folder)
    if root is None:
        return VerifyResult(folder)
    with root:
        manifests = manifests_of(root)
        defects: list[Finding] = []
        stale: list[Finding] = []
        named, repeated = set(), 0
        for key, manifest in manifests.items():
            if isinstance(manifest, Defect):
                defects.append(Finding(root.full(f"{entry.KEYS}/{key}"), str(manifest)))
                continue
            place = root.full(f"{entry.KEYS}/{key}")
            repeated += bool(manifest.inputs)
            if manifest.patch_hash:
                named.add(manifest.entry)
                place = root.full(manifest.text)
            problems = defects
            try:
                _check_entry(root, manifest)
                problems = stale
                check_inputs(manifest.inputs)
            except Defect as defect:
                problems.append(Finding(place, str(defect)))
        leftovers = [name for name in entries_of(root, []) if name not in named]
        leftovers += [f"{entry.KEYS}/{name}" for name in names_in(root, entry.KEYS) if name not in manifests]
        leftovers += [name for name in root.names() if name.startswith(TRASH_PREFIX)]
        paths = tuple(root.full(name) for name in leftovers)
        # An entry and what repeats it have the same defects.
        return VerifyResult(
            root.path,
            len(manifests) - repeated,
            tuple(dict.fromkeys(defects)),
            tuple(dict.fromkeys(stale)),
            paths,
        )


def open_root(path: str) -> Root | None:
    """Open the folder; None when it is missing or no path is given.

    Raises CacheError when it cannot be trusted.
    """
    try:
        return Root(path) if path else None
    except Vanished:
        return None
    except Defect as defect:
        raise CacheError(
            f"the cache folder is not used: {defect}",
            where=path,
            fix="make it private (chown, chmod 700), or name another folder in VEOMNI_CACHE_DIR.",
        ) from defect


def names_in(root: Root, folder: str) -> list[str]:
    """The names in a folder; none in a file, a link or another user's folder: no part of this cache."""
    try:
        return root.names(folder)
    except OSError:
        return []


def manifests_of(root: Root) -> dict[str, entry.Manifest | Defect]:
    """Every stage-1 key with its manifest, or what is wrong with it."""
    manifests: dict[str, entry.Manifest | Defect] = {}
    for key in names_in(root, entry.KEYS):
        if key.endswith(TEMPORARY_SUFFIX) and key.startswith("."):
            continue
        try:
            root.check_folders(entry.KEYS)
            manifests[key] = entry.read_manifest(root, key)
        except Defect as defect:
            manifests[key] = defect
    return manifests


def entries_of(root: Root, manifests: Iterable[object]) -> list[str]:
    """Folders that a manifest names or that hold a lock file, relative to the root."""
    entries = {item.entry for item in manifests if isinstance(item, entry.Manifest) and item.patch_hash}
    for release in root.names():
        if not entry.is_plain(release) or release == entry.KEYS:
            continue
        for name in names_in(root, release):
            if is_kind(root, f"{release}/{name}/{lease.LOCK_NAME}", stat.S_ISREG):
                entries.add(f"{release}/{name}")
    return sorted(entries)


def is_kind(root: Root, name: str, test: Callable[[int], bool]) -> bool:
    """Whether `name` exists and its mode passes `test`; follows no link."""
    try:
        return test(root.status(name).st_mode)
    except OSError:
        return False


def size_of(root: Root, name: str) -> int:
    """Bytes in a file or below a folder; follows no link."""
    try:
        status = root.status(name)
    except OSError:
        return 0
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size
    return sum(size_of(root, f"{name}/{child}") for child in names_in(root, name))


def _describe(root: Root, manifest: entry.Manifest) -> EntryInfo:
    files = (manifest.text, entry.bytecode_name(manifest.text, manifest.tag))
    return EntryInfo(
        module=manifest.module,
        distribution=manifest.distribution,
        version=manifest.version,
        patch_hash=manifest.patch_hash,
        interpreter=manifest.tag,
        path=root.full(manifest.text),
        size=sum(size_of(root, name) for name in files),
        key=manifest.key,
    )


def _check_entry(root: Root, manifest: entry.Manifest) -> None:
    if not manifest.patch_hash:
        return
    if manifest.tag == interpreter_tag():
        entry.load(root, manifest)
        return
    # Another interpreter's marshal cannot be read here; its seal can be checked.
    entry.check_text(root, manifest)
    name = entry.bytecode_name(manifest.text, manifest.tag)
    entry.check_bytecode(root.read(name), root.full(name), manifest.text_seal, manifest.tag)

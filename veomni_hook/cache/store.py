"""Lookup and publication of patched modules; see `entry` for the files.

A lookup never raises: every defect is a Miss with its reason. A publication never breaks an import either:
a full or read-only disk gives NotStored with its reason. Published content depends only on the key, so
writers need no lock among themselves: each file is replaced atomically, the manifest last.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from veomni_hook.cache import entry, lease, location
from veomni_hook.cache.inputs import check_inputs
from veomni_hook.cache.key import interpreter_tag
from veomni_hook.cache.trusted_folder import Defect, Root, Vanished, write_problem

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType
    from typing import Any

    from veomni_hook.cache.clearing import ClearResult
    from veomni_hook.cache.inputs import Inputs
    from veomni_hook.cache.inventory import CacheInfo, VerifyResult

__all__ = ["Hit", "Miss", "NotStored", "Store", "Unpatched", "open_store"]

# A folder can disappear between two steps of a writer only while `clear` runs.
_ATTEMPTS = 10
_PAUSE = 0.005  # seconds


# Plain classes: dataclasses would cost every first import of a target up to 10 ms.
class Unpatched:
    """It is known that no patch applies to the module of `manifest`."""

    __slots__ = ("manifest",)

    def __init__(self, manifest: entry.Manifest) -> None:
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"Unpatched({self.manifest.module!r})"


class Hit:
    """A stored patched module, checked; its entry is in use until this process ends.

    `code` is compiled with `path`, the stored file's absolute path, as ``co_filename``.
    """

    __slots__ = ("_text", "code", "manifest", "path")

    def __init__(self, manifest: entry.Manifest, path: str, code: CodeType, text: bytes) -> None:
        self.manifest = manifest
        self.path = path
        self.code = code
        self._text = text

    def __repr__(self) -> str:
        return f"Hit({self.manifest.module!r}, {self.path!r})"

    def source(self) -> str:
        """The stored text, exactly as it was published."""
        return self._text.decode()

    @property
    def report(self) -> dict[str, Any]:
        """The patch report as it was published; a new dict each time."""
        import json

        report: dict[str, object] = json.loads(self.manifest.report)
        return report


class _Reasoned:
    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason!r})"


class Miss(_Reasoned):
    """Nothing usable is stored; `reason` says what is missing or wrong."""

    __slots__ = ()


class NotStored(_Reasoned):
    """The module could not be stored; `reason` says why. The import continues without the cache."""

    __slots__ = ()


class Store:
    """The cache in one folder.

    `root` is the folder's absolute path (empty: the store holds nothing); `mode` is "disk", "temporary" or
    "memory". `reason` says why the store is not the requested one, or why the last write failed. `refused`
    says why something could not be stored in the requested place; empty if there was no such failure.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        mode: str = "disk",
        reason: str = "",
        substitute: Callable[[str], Store] | None = None,
    ) -> None:
        """Touch no file. `substitute` takes a reason and creates the fallback store if writing fails."""
        self.root = os.path.abspath(root) if os.fspath(root) else ""
        self.mode = mode
        self.reason = reason
        self.refused = "" if mode == "disk" else reason
        self._substitute = substitute
        self._fallback: Store | None = None

    def __repr__(self) -> str:
        return f"Store({self.root!r}, mode={self.mode!r}, reason={self.reason!r})"

    def lookup(self, key: str, module: str, process: Inputs | None = None) -> Hit | Unpatched | Miss:
        """Return what is stored for a key; a Hit keeps its entry in use until this process ends.

        `process` is as for `check_inputs`.
        """
        if not self.root:
            return Miss(self.reason or "this store holds nothing")
        try:
            with Root(self.root) as root:
                return _lookup(root, key, module, process)
        except Defect as defect:
            reason = str(defect)
        except Exception as error:
            # An unforeseen kind of defect must not break an import either: it is reported.
            reason = f"{type(error).__name__}: {error}"
        if self._fallback is not None:
            answer = self._fallback.lookup(key, module, process)
            if not isinstance(answer, Miss):
                return answer
        return Miss(reason)

    def publish(  # noqa: PLR0913 - the fields of an entry, every one by keyword
        self,
        key: str,
        *,
        module: str,
        distribution: str,
        version: str,
        patch_hash: str,
        text: str,
        report: Mapping[str, object],
        absent: Sequence[tuple[str, str]] = (),
    ) -> Hit | NotStored:
        """Store a patched module and return what a lookup would.

        `report` is JSON; a later lookup returns `absent` with the entry.
        Raises SyntaxError or ValueError when `text` cannot be compiled, TypeError when `report` is not JSON.
        """
        import json

        if not self.root:
            return NotStored(self.reason or "this store holds nothing")
        parts = (key, distribution, version, patch_hash, *module.split("."))
        if odd := [part for part in parts if not entry.is_plain(part)]:
            return NotStored(f"{odd[0]!r} cannot be part of a path")
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            return NotStored(f"the text of {module} cannot be written as UTF-8: {error}")
        manifest = entry.Manifest(
            {
                "key": key,
                "module": module,
                "distribution": distribution,
                "version": version,
                "patch_hash": patch_hash,
                "tag": interpreter_tag(),
                "text_seal": entry.seal(data).hex(),
            },
            {},
            json.dumps(report).encode(),
            absent,
            consult=bool(report.get("remarks") or report.get("companions")),
        )
        return self._publish(manifest, data)

    def publish_unpatched(self, key: str, module: str, absent: Sequence[tuple[str, str]] = ()) -> None:
        """Store that no patch applies to `module`; a failure is kept in `reason`."""
        if not self.root or not entry.is_plain(key):
            return
        fields = dict.fromkeys(("distribution", "version", "patch_hash", "text_seal"), "")
        fields |= {"key": key, "module": module, "tag": interpreter_tag()}
        try:
            with Root.create(self.root) as root:
                _write_manifest(root, entry.Manifest(fields, {}, b"{}", absent))
        except (OSError, Defect) as error:
            self.reason = self.refused = _reason(error, self.root)

    def repeat(self, key: str, stored: str, inputs: Inputs, absent: Sequence[tuple[str, str]] = ()) -> None:
        """Answer `key` with what is stored for the key `stored`, as long as `inputs` hold.

        What cannot be written is only found more slowly, so no failure is kept.
        """
        for store in filter(None, (self, self._fallback)):
            try:
                with Root(store.root) as root:
                    manifest = entry.read_manifest(root, stored)
                    manifest.key, manifest.inputs, manifest.absent = key, inputs, tuple(absent)
                    _write_manifest(root, manifest)
            except (OSError, Defect):
                continue

    def info(self) -> CacheInfo:
        """Return what the cache holds; raises CacheError when its folder cannot be trusted."""
        from veomni_hook.cache.inventory import info  # only the command line needs this

        return info(self.root, self.mode, self.reason)

    def verify(self) -> VerifyResult:
        """Check every manifest and entry; raises CacheError when the folder cannot be trusted."""
        from veomni_hook.cache.inventory import verify  # as in `info`

        return verify(self.root)

    def clear(self, *, force: bool = False) -> ClearResult:
        """Remove every entry that no running process uses (`force`: all entries).

        Raises CacheError when the folder cannot be trusted.
        """
        from veomni_hook.cache.clearing import clear  # as in `info`

        return clear(self.root, force=force)

    def _publish(self, manifest: entry.Manifest, text: bytes) -> Hit | NotStored:
        if not self.root:  # the substitute of a substitute that could not be made
            return NotStored(self.reason)
        for _ in range(_ATTEMPTS):
            try:
                with Root.create(self.root) as root:
                    return _publish(root, manifest, text)
            except (Vanished, FileNotFoundError) as error:
                self.reason = _reason(error, self.root)
                time.sleep(_PAUSE)
            except (OSError, Defect) as error:
                self.reason = _reason(error, self.root)
                break
        self.refused = self.reason
        if self._substitute is None:
            return NotStored(self.reason)
        self._fallback = self._fallback or self._substitute(self.reason)
        return self._fallback._publish(manifest, text)


def open_store(cache_dir: str | None = None, *, process: int | None = None) -> Store:
    """The store in `cache_dir`, by default the user's cache folder, which is created (0700) if missing.

    A folder that another user could have written is refused. In that case, and whenever the folder cannot be
    written, the fallback is a private temporary folder that is removed when this process ends, or else a
    store that holds nothing. Processes forked from `process` (the one that loaded the hook) create no
    temporary folder. `os.devnull` selects a store that holds nothing. Never raises OSError.
    """

    def substitute(problem: str) -> Store:
        folder, why = location.make_temporary(process)
        if why:
            return Store("", mode="memory", reason=f"{problem}; {why}")
        return Store(folder, mode="temporary", reason=problem)

    if cache_dir == location.NOWHERE:
        return Store("", mode="memory")
    folder, problem = location.choose(cache_dir)
    if problem:
        return substitute(problem)
    return Store(folder, reason=write_problem(folder), substitute=substitute)


def _lookup(root: Root, key: str, module: str, process: Inputs | None) -> Hit | Unpatched:
    if not entry.is_plain(key):
        raise Defect(f"{key!r} is not a key")
    root.check_folders(entry.KEYS)
    manifest = entry.read_manifest(root, key)
    if manifest.module != module:
        raise Defect(f"the key was stored for {manifest.module}, not for {module}")
    if manifest.tag != interpreter_tag():
        raise Defect(f"the key was stored by {manifest.tag}, not by {interpreter_tag()}")
    check_inputs(manifest.inputs, process)
    if not manifest.patch_hash:
        return Unpatched(manifest)
    descriptor = lease.share(root, manifest.entry)
    try:
        code, text = entry.load(root, manifest)
    except BaseException:
        os.close(descriptor)
        raise
    lease.keep(descriptor, root.path)
    return Hit(manifest, root.full(manifest.text), code, text)


def _publish(root: Root, manifest: entry.Manifest, text: bytes) -> Hit:
    root.make_folders(manifest.entry)
    descriptor = lease.share(root, manifest.entry, create=True)
    try:
        bytecode = entry.bytecode_name(manifest.text, manifest.tag)
        root.make_folders(bytecode.rpartition("/")[0])
        path = root.full(manifest.text)
        code = compile(text.decode(), path, "exec", dont_inherit=True)
        stored = None
        with suppress(Defect):
            stored = root.read(manifest.text)
        if stored != text:  # a process may be running from an equal file, which stays
            root.write(manifest.text, text)
        root.write(bytecode, entry.pack_bytecode(code, manifest.text_seal, manifest.tag))
        _write_manifest(root, manifest)
    except BaseException:
        os.close(descriptor)
        raise
    lease.keep(descriptor, root.path)
    return Hit(manifest, path, code, text)


def _write_manifest(root: Root, manifest: entry.Manifest) -> None:
    # `clear` removes the folder of keys whenever it is empty, and no lock says that a key is coming.
    for _ in range(_ATTEMPTS):
        root.make_folders(entry.KEYS)
        with suppress(FileNotFoundError):
            return root.write(f"{entry.KEYS}/{manifest.key}", manifest.encode())
    raise Vanished(f"{entry.KEYS} is removed again and again")


def _reason(error: OSError | Defect, root: str) -> str:
    if isinstance(error, OSError):
        # Names are relative to the opened root, and errors of write or fsync have none.
        return f"{os.path.join(root, error.filename or '')}: {error.strerror or error}"
    return str(error)

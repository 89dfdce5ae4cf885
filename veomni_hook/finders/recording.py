"""What loading configs depends on, recorded while they load: see `record`.

An audit hook hears what Python opens and lists. It cannot be removed, so it is added when the first config
loads, and does nothing between loads. Questions that raise no event (imports of loaded modules, `os.stat`,
the environment) are heard because their functions are replaced during a load. Threads that load no config
pass through.
"""

from __future__ import annotations

import _thread
import builtins
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from veomni_hook.cache.inputs import MISSING, observe, origin
from veomni_hook.finders.installed import pinned, watch_packages
from veomni_hook.finders.loading_guard import LOADING, unrecorded
from veomni_hook.finders.state import STATE

if TYPE_CHECKING:
    from veomni_hook.patches.spec import PatchConfig

__all__ = ["record", "record_replacements"]

#: Events after which nobody knows what a config depends on: the first part of their names, or the whole name.
_FAMILIES = frozenset(
    "_thread ctypes ftplib http imaplib poplib pty smtplib socket sqlite3 subprocess urllib winreg".split()
)
_UNKNOWN = frozenset(
    f"os.{name}"
    for name in "chdir exec fork forkpty posix_spawn putenv spawn startfile system unsetenv".split()
) | {"builtins.input"}
_LISTED = frozenset(("os.listdir", "os.scandir"))
#: What functions of `os` ask for that raise no event.
_ASKED = {
    **dict.fromkeys(("access", "lstat", "readlink", "stat"), "place"),
    **dict.fromkeys(("getcwd", "getcwdb"), "folder"),
}
_IMPORTLIB = "<frozen importlib"


_LOCK = threading.Lock()
#: How many threads load configs now, and what their load replaced: object, name, original, ours.
_LOADS: list[None] = []
_REPLACED: list[tuple[Any, str, Any, Any]] = []
_HEARING: list[Callable[..., None]] = []


@contextmanager
def record(names: Iterable[str]) -> Iterator[None]:
    """Record in `STATE.recorded` and `STATE.unrecorded` what this thread's load of configs depends on.

    Args:
        names: the config modules. What they and the modules that they import read counts, to any depth,
            except what installed distributions read for themselves when they are imported.
    """
    modules = [name.partition(":")[0] for name in names]
    watch_packages(name.partition(".")[0] for name in modules)
    if LOADING.recorded or not modules:  # a config that loads configs, or built-in specs alone
        yield
        return
    with _heard():
        LOADING.recorded, LOADING.loader = True, sys._getframe(2)  # above it is the context manager's
        try:
            for name in modules:
                _expected(name)
            yield
            for name in modules:
                _use(name)
        finally:
            LOADING.recorded, LOADING.loader = False, None


def record_replacements(configs: Iterable[PatchConfig]) -> None:
    """Record the files that configs take definitions from: they count also where they are installed."""
    for config in configs:
        taken = [patch.replacement for patch in config.patches]
        taken += [*config.helpers, *(positioned.helper for positioned in config.positioned_helpers)]
        places = [sys.modules.get(getattr(definition, "__module__", None) or "") for definition in taken]
        files = [getattr(place, "__file__", None) or "" for place in places]
        files += [
            origin(patch.replacement_source.rpartition(".")[0])
            for patch in config.patches
            if patch.replacement_source
        ]
        for path in dict.fromkeys(files):
            if path.endswith(".py"):
                _observe("file", os.path.abspath(path))


@contextmanager
def _heard() -> Iterator[None]:
    """Hear the questions of loads in this block; the last load to end takes its functions back."""
    with _LOCK:
        _LOADS.append(None)
        if not _HEARING:
            _HEARING.append(_hear)
            sys.addaudithook(_hear)
        if not _REPLACED:
            _replace(builtins, "__import__", _importing)
            # `importlib.import_module` raises no event, and modules keep it under their own names.
            _replace(importlib._bootstrap, "_gcd_import", _importing_module)
            for name, kind in _ASKED.items():
                _replace(os, name, partial(_Asking, kind=kind))
            for holder, name in ((_thread, "start_new_thread"), (threading, "_start_new_thread")):
                if hasattr(holder, name):  # an event tells of it from Python 3.12 on
                    _replace(holder, name, _starting)
            for environment in (os.environ, getattr(os, "environb", os.environ)):
                if type(environment) is os._Environ:
                    _replace(environment, "__class__", lambda _: _Environment)
    try:
        yield
    finally:
        with _LOCK:
            _LOADS.pop()
            while _REPLACED and not _LOADS:
                holder, name, function, ours = _REPLACED.pop()
                if getattr(holder, name) is ours:  # otherwise what a config imports has wrapped it
                    setattr(holder, name, function)


def _replace(holder: object, name: str, wrap: Callable[[Any], object]) -> None:
    function = getattr(holder, name)
    ours = wrap(function)
    _REPLACED.append((holder, name, function, ours))
    setattr(holder, name, ours)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook. It may not raise: the event would fail."""
    if not (_LOADS and LOADING.recorded):
        return
    if event == "open":
        path, _, flags = arguments
        if not flags & (os.O_WRONLY | os.O_TRUNC | os.O_EXCL):
            _see("file", path)
    elif event in _LISTED:
        # The import system lists the folders that it searches; `module` observes what it finds.
        if not sys._getframe(1).f_code.co_filename.startswith(_IMPORTLIB):
            _see("names", arguments[0] if arguments[0] is not None else ".")
    elif event == "import":
        if arguments[1]:  # the file of an extension module
            _see("file", arguments[1])
    elif event in _UNKNOWN or event.partition(".")[0] in _FAMILIES:
        with unrecorded():
            if _is_configs(sys._getframe(1)):
                _cannot(f"a config causes {event}")


def _see(kind: str, name: Any) -> None:
    """Record an observation, unless an installed module that is being imported asks for it."""
    with unrecorded():
        if not _is_configs(sys._getframe(2)):
            return
        try:
            name = os.fsdecode(name)
        except TypeError:
            if kind != "file":  # an opened file was recorded when it was opened
                _cannot("a config asks for a file by its descriptor")
            return
        if kind == "file":
            if name.endswith(".pyc") and os.path.basename(os.path.dirname(name)) == "__pycache__":
                name = importlib.util.source_from_cache(name)
            if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
                _cannot(f"a config reads {name}, which is no regular file")
                return
            # The source of an installed module that a config imports: nothing of it is executed yet.
            if sys._getframe(2).f_code.co_filename.startswith(_IMPORTLIB) and pinned("", name)[0]:
                return
        _observe(kind, name)


def _observe(kind: str, name: str) -> None:
    seen = observe(kind, name)
    if STATE.recorded.setdefault((kind, name), seen) != seen:
        _cannot(f"{kind} {name} changed while configs were loaded")


def _cannot(why: str) -> None:
    STATE.unrecorded = STATE.unrecorded or why


def _is_configs(frame: FrameType | None) -> bool:
    """Whether what runs there belongs to a config, not to an installed module that is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            module = frame.f_globals
            return not pinned(module.get("__name__", ""), module.get("__file__") or "")[0]
        if frame is LOADING.loader:
            return True
        frame = frame.f_back
    return True


# What is replaced during a load


def _importing(function: Any) -> Any:
    def __import__(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if not LOADING.recorded:
            return function(name, globals, locals, fromlist, level)
        with unrecorded():
            absolute = _absolute(name, globals, level)
            items = [item for item in fromlist or () if item != "*"]
            for asked in (absolute, *(f"{absolute}.{item}" for item in items)):
                _expected(asked)
        try:
            return function(name, globals, locals, fromlist, level)
        finally:
            with unrecorded():
                if absolute and _is_configs(sys._getframe(1)):
                    for used in _used(absolute, fromlist or ()):
                        _use(used)

    return __import__


def _importing_module(function: Any) -> Any:
    def _gcd_import(name: str, package: str | None = None, level: int = 0) -> Any:
        if not LOADING.recorded:
            return function(name, package, level)
        absolute = _absolute(name, {"__package__": package}, level)
        with unrecorded():
            _expected(absolute)
        try:
            return function(name, package, level)
        finally:
            with unrecorded():
                if absolute and _is_configs(sys._getframe(1)):
                    _use(absolute)

    return _gcd_import


def _starting(function: Any) -> Any:
    def start_new_thread(*arguments: Any, **named: Any) -> Any:
        if LOADING.recorded and _is_configs(sys._getframe(1)):
            _cannot("a config starts a thread")
        return function(*arguments, **named)

    return start_new_thread


class _Asking:
    """A function of `os` that is recorded. It equals the function, for sets such as `os.supports_dir_fd`."""

    def __init__(self, function: Callable[..., object], kind: str) -> None:
        self.function, self.kind = function, kind
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *arguments: object, **named: object) -> Any:
        if LOADING.recorded:
            if named.get("dir_fd") is not None:
                _cannot("a config asks for a file below a descriptor")
            path = (arguments[0] if arguments else named.get("path", "")) if self.kind == "place" else ""
            if not isinstance(path, int):
                _see(self.kind, path)
        return self.function(*arguments, **named)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.function

    def __hash__(self) -> int:
        return hash(self.function)


class _Environment(os._Environ):  # type: ignore[type-arg]
    """The class of `os.environ` during a load. All variables together are never the same again."""

    def __getitem__(self, key: object) -> Any:
        if LOADING.recorded and isinstance(key, str | bytes):
            _see("variable", key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self._all()
        return super().__iter__()

    def __len__(self) -> int:
        self._all()
        return super().__len__()

    def _all(self) -> None:
        if LOADING.recorded:
            with unrecorded():
                if _is_configs(sys._getframe(2)):
                    _cannot("a config goes through all environment variables")


# Modules


def _absolute(name: str, namespace: Any, level: int) -> str:
    """The module's full name; empty if the import fails anyway."""
    if not level:
        return name
    namespace = namespace or {}
    package = namespace.get("__package__")
    if package is None:
        package = namespace.get("__name__", "").rpartition("." if "__path__" not in namespace else "\0")[0]
    try:
        return importlib.util.resolve_name("." * level + name, package)
    except ImportError:
        return ""


def _expected(name: str) -> None:
    """Note which modules an import would execute: what they do is recorded."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        if module not in sys.modules:
            STATE.executed.add(module)


def _used(name: str, items: Iterable[str]) -> Iterator[str]:
    """The modules that an import statement gives access to.

    A package whose submodules alone are taken is not among them: what it has defined itself is not used.
    """
    parts = name.split(".")
    if not items:  # `import a.b` binds a
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return
    module = sys.modules.get(name)
    for item in items:
        below = sys.modules.get(f"{name}.{item}")
        if module is None or below is None or getattr(module, item, None) is not below:
            yield name
        if below is not None or not hasattr(module, item):
            yield f"{name}.{item}"


def _use(name: str) -> None:
    """Record where a module comes from that a config uses."""
    module = sys.modules.get(name)
    place = getattr(module, "__file__", None) or ""
    try:
        whereabouts = origin(name)
    except Exception as error:  # a finder of somebody else's
        _cannot(f"{name} cannot be looked for: {type(error).__name__}: {error}")
        return
    by_version, files = pinned(name, place or (whereabouts if whereabouts != MISSING else ""))
    if files:
        _observe("file", files)
    if by_version:
        return
    if module is not None and name not in STATE.executed:
        _cannot(f"{name}, which a config imports, was imported before")
    _observe("module", name)

"""What configs depended on: observations that are made while they load, and repeated on a hit.

Nothing is parsed or imported for an observation, and none depends on a date.
"""

from __future__ import annotations

import os
import stat
import sys

from veomni_hook.cache.key import digest
from veomni_hook.cache.trusted_folder import Defect
from veomni_hook.locate import locate

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    #: What was seen, by kind and name; see `observe`.
    Inputs = Mapping[tuple[str, str], str]

__all__ = ["LIST", "MISSING", "check_inputs", "observe", "origin"]

MISSING = "missing"
#: In the folder of an installed distribution's metadata: its files, with their digests.
LIST = "RECORD"
#: From this size on, a file counts by its size and time: to read a checkpoint takes longer than to patch.
_LARGE = 1 << 26
#: Digests of files, by path, size and time, as long as the process: a release's list of files has megabytes.
_LISTS: dict[tuple[str, int, int], str] = {}


def observe(kind: str, name: str) -> str:
    """Return what is seen of something now.

    Args:
        kind: ``file``: a file's content, ``place``: whether there is a file, a folder or a link, ``names``:
            what a folder contains, ``variable``: of the environment, ``folder``: the working directory,
            ``module``: where an import finds it.
        name: a path, absolute or relative to the working directory; the name of a variable or a module.
    """
    observer, _ = _KINDS[kind]
    return observer(name)


def check_inputs(inputs: Inputs, process: Inputs | None = None) -> None:
    """Raise Defect unless loading the configs now would see what was seen then.

    Args:
        inputs: what was seen.
        process: what loading configs has seen in this process. Of a module that was imported without being
            watched, nobody knows what it holds now.
    """
    process = process or {}
    for (kind, name), seen in inputs.items():
        if kind not in _KINDS:
            raise Defect(f"nothing can be seen of a {kind}")
        if kind == "module" and name in sys.modules and (kind, name) not in process:
            raise Defect(f"{name}, which a config imports, was imported before")
        now = observe(kind, name)
        if now != seen or process.get((kind, name), seen) != seen:
            what = _KINDS[kind][1].format(name)
            raise Defect(f"{what}, {'is gone' if now == MISSING else 'has changed'}")


def origin(module: str) -> str:
    """Return where an import would find a module: its file, or the folders of a namespace package."""
    spec = locate(module)
    if spec is None:
        return MISSING
    return spec.origin or os.pathsep.join(spec.submodule_search_locations or ())


def _file(path: str) -> str:
    try:
        status = os.stat(path)
        known = path, status.st_size, status.st_mtime_ns
        if not stat.S_ISREG(status.st_mode):
            return _place(path)  # to open a pipe would wait for its writer
        if status.st_size >= _LARGE:
            return f"{status.st_size} {status.st_mtime_ns}"
        if known in _LISTS:
            return _LISTS[known]
        with open(path, "rb", buffering=0) as file:
            seen = digest(file.read())
    except (OSError, ValueError):
        return _place(path)
    if os.path.basename(path) == LIST:
        _LISTS[known] = seen
    return seen


def _place(path: str) -> str:
    try:
        link = f"{os.readlink(path)} " if os.path.islink(path) else ""
        status = os.stat(path)
    except (OSError, ValueError):
        return MISSING
    if stat.S_ISREG(status.st_mode):
        return f"{link}file of {status.st_size}"
    return f"{link}{stat.S_IFMT(status.st_mode):o}"


def _names(path: str) -> str:
    try:
        with os.scandir(path) as entries:
            # Python makes its folder of bytecode when it imports, which is no change.
            seen = ["" if one.name == "__pycache__" else f"{one.name}/{one.is_dir()}" for one in entries]
    except (OSError, ValueError):
        return MISSING
    return digest("\0".join(sorted(seen)).encode())


def _variable(name: str) -> str:
    value = os.environ.get(name)  # digested: it may be a secret
    return MISSING if value is None else digest(os.fsencode(value))


def _folder(_: str) -> str:
    try:
        return os.getcwd()
    except OSError:
        return MISSING


#: By kind: what observes it, and how messages name it.
_KINDS: dict[str, tuple[Callable[[str], str], str]] = {
    "file": (_file, "{}, which a config was read from"),
    "place": (_place, "{}, which a config looked for"),
    "names": (_names, "the folder {}, which a config listed"),
    "variable": (_variable, "the environment variable {}, which a config reads"),
    "folder": (_folder, "the working directory, which a config asked for"),
    "module": (origin, "the place of the module {}, which a config imports"),
}

"""Where the cache lies: the folder asked for, if no other user could swap it or write in it; else a reason.

Symbolic links above the folder are followed (a home or its ``.cache`` often is one) when they belong to this
user or to the superuser. The folder itself must be this user's alone to write.
"""

from __future__ import annotations

import os
import stat
import sys

from veomni_hook.cache.trust import Defect, Root, ownership_problem

__all__ = ["Location", "choose", "make_temporary", "write_problem"]

_APPLICATION = "veomni-hook"


class Location:
    """A folder's real absolute path; `problem` is empty, or why it cannot be used."""

    __slots__ = ("path", "problem")

    def __init__(self, path: str, problem: str = "") -> None:
        self.path = path
        self.problem = problem


def choose(cache_dir: str | None) -> Location:
    """`cache_dir`, or the user's cache folder; made private (0700) where missing. Never raises OSError."""
    path = os.path.expanduser(cache_dir or _default())
    if path.startswith("~"):
        return Location(path, f"{path}: this user has no home folder")
    path = os.path.abspath(path)
    problem = _swappable(path)
    if problem:
        return Location(path, problem)
    real = os.path.realpath(path)
    try:
        Root.create(real).close()
    except Defect as defect:
        return Location(real, str(defect))
    except OSError as error:
        return Location(real, f"{error.filename or real}: {error.strerror or error}")
    return Location(real)


def write_problem(path: str) -> str:
    """Why an existing folder cannot be written; empty when it can."""
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written"


def make_temporary(process: int | None = None) -> Location:
    """A new private folder that the process making it removes when it ends.

    Args:
        process: the process that loaded the hook; what was forked from it makes no folder.
    """
    import atexit
    import tempfile

    if _may_end_without_cleaning(process):
        return Location("", "a forked process makes no temporary folder: it may end without removing it")
    try:
        path = os.path.realpath(tempfile.mkdtemp(prefix=f"{_APPLICATION}-"))
    except OSError as error:
        return Location("", f"no temporary folder can be made: {error.strerror or error}")
    atexit.register(_remove_temporary, path, os.getpid())
    return Location(path)


def _may_end_without_cleaning(process: int | None) -> bool:
    """Whether this process was forked: such ones often end by `os._exit`, which runs no exit handler.

    What was forked before the hook was loaded, other than by multiprocessing, cannot be told.
    """
    if process is not None and os.getpid() != process:
        return True
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None or not hasattr(os, "fork"):
        return False
    forked = (multiprocessing.context.ForkProcess, multiprocessing.context.ForkServerProcess)
    return isinstance(multiprocessing.current_process(), forked)


def _default() -> str:
    import platformdirs

    return platformdirs.user_cache_dir(_APPLICATION, appauthor=False)


def _swappable(path: str) -> str:
    """Why another user could put something else in the place of `path`; empty when none could.

    Group-writable folders above it pass: with one group a user they are the rule, and what is executed comes
    through the descriptor that `Root` has checked.
    """
    if not hasattr(os, "geteuid"):
        return ""
    for place in (path, *_above(path), *_above(os.path.realpath(path))):
        try:
            status = os.lstat(place)
        except OSError:
            continue  # not there yet: made private
        if stat.S_ISLNK(status.st_mode):
            if problem := ownership_problem(status, links=True):
                return f"the symbolic link {place} {problem}"
        elif place != path and status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"{place}, above the cache, can be written by every user and has no sticky bit"
    return ""


def _above(path: str) -> list[str]:
    places = []
    while path != (path := os.path.dirname(path)):
        places.append(path)
    return places


def _remove_temporary(path: str, process: int) -> None:
    # A forked child inherits the exit handler but not the folder.
    if os.getpid() != process:
        return
    from veomni_hook.cache import lease
    from veomni_hook.cache.clearing import clear
    from veomni_hook.cache.store import Store
    from veomni_hook.errors import CacheError

    lease.release(path)
    try:
        clear(Store(path, mode="temporary"))
        os.rmdir(path)
    except (CacheError, OSError):
        return  # a forked child still runs from it, or it is gone: the system's own cleaning takes the rest

"""The cache folder: the requested one if no other user could replace it or write to it; otherwise a reason.

Symbolic links above the folder are followed (a home or its ``.cache`` often is one) when they belong to this
user or to the superuser. Only this user may be able to write to the folder itself.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from veomni_hook.cache import lease
from veomni_hook.cache.trusted_folder import Defect, Root
from veomni_hook.ownership import swap_problem

__all__ = ["NOWHERE", "choose", "make_temporary"]

#: The folder name that selects a cache in memory only; it cannot contain files.
NOWHERE = os.devnull

_APPLICATION = "veomni-hook"


def choose(cache_dir: str | None) -> tuple[str, str]:
    """Return the real absolute path of the cache folder, and why it cannot be used; empty if it can.

    It is `cache_dir`, or the user's cache folder; created private (0700) if missing. Never raises.
    """
    path = os.path.expanduser(cache_dir or "")
    if not path:
        import platformdirs  # not where a setting names the folder

        with suppress(RuntimeError):  # this user has neither a home nor a variable that names one
            path = platformdirs.user_cache_dir(_APPLICATION, appauthor=False)
    if not path or path.startswith("~"):
        path = path or "the user's cache folder"
        return path, f"{path}: this user has no home folder, and VEOMNI_CACHE_DIR names no other"
    try:
        path = os.path.abspath(path)
    except OSError as error:
        return path, f"{path} is relative, and there is no working directory: {error.strerror}"
    if problem := swap_problem(path, what="the cache"):
        return path, problem
    real = os.path.realpath(path)
    try:
        Root.create(real).close()
    except Defect as defect:
        return real, str(defect)
    except OSError as error:
        return real, f"{error.filename or real}: {error.strerror or error}"
    return real, ""


def make_temporary(process: int | None = None) -> tuple[str, str]:
    """Create a private folder, which this process removes at exit; return its path, or why there is none.

    Args:
        process: the process that loaded the hook; processes forked from it create no folder.
    """
    # Few processes need a temporary folder.
    import atexit
    import tempfile

    if _may_end_without_cleaning(process):
        return "", "a forked process makes no temporary folder: it may end without removing it"
    try:
        path = os.path.realpath(tempfile.mkdtemp(prefix=f"{_APPLICATION}-"))
    except OSError as error:
        return "", f"no temporary folder can be made: {error.strerror or error}"
    atexit.register(_remove_temporary, path, os.getpid())
    return path, ""


def _may_end_without_cleaning(process: int | None) -> bool:
    """Whether this process was forked: those often end with `os._exit`, which runs no exit handler.

    A fork before the hook was loaded can be detected only if multiprocessing made it.
    """
    if process is not None and os.getpid() != process:
        return True
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None or not hasattr(os, "fork"):
        return False
    forked = (multiprocessing.context.ForkProcess, multiprocessing.context.ForkServerProcess)
    return isinstance(multiprocessing.current_process(), forked)


def _remove_temporary(path: str, process: int) -> None:
    # A forked child inherits the exit handler but not the folder.
    if os.getpid() != process:
        return
    # Imports of targets need neither: this runs at exit.
    from veomni_hook.cache.clearing import clear
    from veomni_hook.errors import CacheError

    lease.release(path)
    try:
        clear(path)
        os.rmdir(path)
    except (CacheError, OSError):
        return  # a forked child still uses it, or it is gone: the system's own cleanup removes the rest

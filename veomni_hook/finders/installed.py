"""Which modules count by their versions: those of Python, and of installed distributions.

A distribution's list of files has their digests, so it stands for all of them. Files that are edited in
place are not noticed there, except those of the packages that hold configs.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable

from veomni_hook.cache.inputs import LIST
from veomni_hook.finders.loading_guard import unrecorded
from veomni_hook.finders.state import STATE

__all__ = ["pinned", "watch_packages"]

#: They count by versions in the key or by the engine's digest where they are not installed, too.
_PINNED = frozenset(("transformers", "torch", "numpy", "veomni_hook"))


def watch_packages(packages: Iterable[str]) -> None:
    """Let the files of these packages, which hold configs, count one by one wherever they are."""
    added = {*packages} - _PINNED - STATE.config_packages
    if added:
        STATE.config_packages |= added
        STATE.pinned.clear()


def pinned(name: str, place: str) -> tuple[bool, str]:
    """Return whether a module counts by its version, and its distribution's list of files, if it has one.

    Args:
        name: the module; empty if only its file is known.
        place: its file; empty if it has none.
    """
    top = name.partition(".")[0]
    if top in STATE.config_packages:
        return False, ""
    key = top, place
    if key not in STATE.pinned:
        with unrecorded():
            STATE.pinned[key] = _distribution(top, place)
    return STATE.pinned[key]


def _distribution(top: str, place: str) -> tuple[bool, str]:
    paths = {name: path + os.sep for name, path in sysconfig.get_paths().items()}
    installed = paths["purelib"], paths["platlib"]
    if not place or place in ("built-in", "frozen"):
        return top in sys.stdlib_module_names or top in _PINNED, ""
    if all(part.startswith(installed) for part in place.split(os.pathsep)):
        if not os.path.isfile(place):
            return True, ""  # a namespace package
    elif place.startswith((paths["stdlib"], paths["platstdlib"])):
        return True, ""
    for folder in sys.path:
        if folder and place.startswith(folder + os.sep):
            below = os.path.relpath(place, folder).replace(os.sep, "/")
            if below.partition("/")[0].removesuffix(".py") in STATE.config_packages:
                return False, ""
            if files := _list_of(folder, below):
                return True, files
    return top in _PINNED, ""


def _list_of(folder: str, below: str) -> str:
    """The list of files, of the distributions in a folder, that has a file below it; empty if none has."""
    wanted = f"{below},"
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    except OSError:
        return ""
    # The distribution has most often the name of its package.
    top = below.partition("/")[0].removesuffix(".py").lower()
    for name in sorted(names, key=lambda name: not name.lower().startswith(top)):
        path = os.path.join(folder, name, LIST)
        try:
            with open(path, encoding="utf-8", newline="") as file:
                text = file.read()
        except (OSError, ValueError):
            continue
        if text.startswith(wanted) or f"\n{wanted}" in text:
            return path
    return ""

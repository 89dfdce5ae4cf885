"""The transformers release that a config was made for, if the config or a file beside it says so."""

from __future__ import annotations

import os
import re
import sys

from veomni_hook.patches.spec import PatchConfig

__all__ = ["beside", "written_for"]

#: The line with which patchgen heads the files that it generates.
_BASED_ON = re.compile(r"^#\s*Based on: transformers==(\S+)\s*$", re.MULTILINE)
_RELEASE = re.compile(r"\d+(?:\.\w+)+")
_HEAD = 4096


def written_for(config: PatchConfig) -> str:
    """Return the release that a config was made for: what its `transformers_version` says, or the head of
    the file that patchgen generated from it; empty if neither is there.
    """
    match = _RELEASE.search(config.transformers_version or "")
    if match is not None:
        return match.group()
    module = sys.modules.get(config.name.partition(":")[0])
    path = getattr(module, "__file__", None) or config.origin.partition(", ")[0].rpartition(":")[0]
    return beside(path, config.target_file) if os.path.isfile(path) else ""


def beside(path: str, target_file: str = "") -> str:
    """Return the release that the generated files of a config module name.

    Args:
        path: the config module's file.
        target_file: the name of the generated file; by default any in the folder `generated` counts, and if
            they name several releases, none does.
    """
    folder = os.path.join(os.path.dirname(path), "generated")
    if target_file:
        named = os.path.basename(target_file)
        places = [os.path.join(folder, named), os.path.join(os.path.dirname(path), named)]
        return next(filter(None, map(_based_on, places)), "")
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    except OSError:
        return ""
    releases = {_based_on(os.path.join(folder, name)) for name in names} - {""}
    return releases.pop() if len(releases) == 1 else ""


def _based_on(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            match = _BASED_ON.search(file.read(_HEAD))
    except (OSError, UnicodeDecodeError):
        return ""  # no such file, or not one of patchgen's
    return match.group(1) if match else ""

"""The sources of any transformers release: installed, in a folder, in a wheel, or downloaded as one.

Only the files that patches can concern are unpacked, into a temporary folder; nothing is installed or run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from veomni_hook.finders.targets import is_target
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.sources import SourceTree, source_tree
from veomni_hook.tools.cli.usage import UsageError

__all__ = ["Releases", "downloaded", "release"]

_VERSION = re.compile(r"v?(\d+(?:\.\w+)+)")
_WANTED = re.compile(r"transformers/(?:__init__|models/\w+/\w+)\.py")
_SECONDS = 600


class Releases(ExitStack):
    """Releases by what the user calls them, each unpacked once; a context manager that removes them."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, SourceTree] = {}

    def get(self, name: str, option: str) -> SourceTree:
        """Return a release; arguments and errors are those of `release`."""
        if name not in self._known:
            self._known[name] = self.enter_context(release(name, option))
        return self._known[name]


@contextmanager
def release(name: str, option: str) -> Iterator[SourceTree]:
    """Provide the sources of a release; temporary ones are removed at the end.

    Args:
        name: a version (`5.23.0`), a wheel, or a folder with the package (an unpacked wheel, a checkout).
        option: the option that names it, for errors.

    Raises:
        UsageError: it is none of these, is not there, holds no transformers, or cannot be downloaded.
    """
    if os.path.isdir(name):
        yield source_tree(name, where=option)
        return
    number = _VERSION.fullmatch(name)
    if name.endswith(".whl") or os.path.isfile(name):
        path = name
    elif number is None:
        raise UsageError(
            f"{name!r} is no release of transformers",
            where=option,
            fix="name a version (5.23.0), a wheel, or a folder with the transformers package",
        )
    else:
        installed = None
        with suppress(UsageError):  # other releases can be read without one
            installed = source_tree()
        if installed is not None and installed.version == number.group(1):
            yield installed
            return
        path = ""
    with tempfile.TemporaryDirectory(prefix="veomni-hook-") as folder:
        wheel = path or downloaded(number.group(1) if number else name, folder, option)
        _unpack(wheel, folder, option)
        yield source_tree(folder, where=option)


def _unpack(path: str, folder: str, option: str) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            wanted = [
                name
                for name in archive.namelist()
                if _WANTED.fullmatch(name) or is_target(name.removesuffix(".py").replace("/", "."))
            ]
            archive.extractall(folder, wanted)
    except FileNotFoundError:
        fix = "correct the path, or name a version (5.23.0) and let pip download its wheel"
        raise UsageError("there is no such wheel", where=f"{option} {path}", fix=fix) from None
    except (OSError, zipfile.BadZipFile) as error:
        fix = "name another wheel: pip download --no-deps transformers==VERSION fetches one"
        raise UsageError(f"the wheel cannot be read: {error}", where=f"{option} {path}", fix=fix) from error


def downloaded(version: str, folder: str, option: str) -> str:
    """Let pip download the wheel of a version into a folder; it keeps a cache of its own.

    Raises:
        UsageError: there is no such release, or it cannot be had; ``option`` is the one that named it.
    """
    name = f"transformers=={version}"
    fix = f"where there is a network: pip download --no-deps {name}, then {option} FILE.whl"
    output.note(f"downloading {name}, which is not installed")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", "--dest", folder, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(f"pip did not get {name} in {_SECONDS} s", where=option, fix=fix) from None
    wheels = [one for one in os.listdir(folder) if one.endswith(".whl")]
    if done.returncode == 0 and wheels:
        return os.path.join(folder, wheels[0])
    said = done.stderr.strip()
    if "No matching distribution found" in said:
        known = re.search(r"from versions: (.*)\)", said)
        newest = known.group(1).split(", ")[-3:] if known and known.group(1) != "none" else []
        if newest:
            raise UsageError(
                f"there is no release {version} of transformers",
                where=option,
                fix=f"name another one; the newest are {', '.join(newest)}",
            )
    last = said.splitlines()[-1] if said else f"pip ended with status {done.returncode}"
    raise UsageError(f"{name} cannot be downloaded: {last}", where=option, fix=fix)

"""The settings file: the nearest one upward that no other user can have modified.

It decides what is imported and where files are written. So it must belong to this user or to the superuser,
and nobody else may be able to write it (except a group whose only member is this user) or to replace it. A
process of the superuser ignores files of other users.
"""

from __future__ import annotations

import os

from veomni_hook.errors import SettingsError
from veomni_hook.ownership import ownership_problem, swap_problem

__all__ = ["nearest"]

TABLE = "veomni-hook"
FILE_NAME = "veomni-hook.toml"


def nearest(start_dir: str | None) -> tuple[str | None, dict[str, object], dict[str, str]]:
    """Return the nearest settings file that may be used, its table, and why nearer ones are ignored, by path.

    Args:
        start_dir: where the search upward begins; the working directory by default.

    Raises:
        SettingsError: a file that may be used is not valid TOML.
    """
    ignored: dict[str, str] = {}
    try:
        folder = os.path.abspath(start_dir or os.getcwd())
    except OSError:  # the working directory was deleted
        return None, {}, ignored
    while True:
        for name in (FILE_NAME, "pyproject.toml"):
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                continue
            data, problem = _read(path)
            if name == FILE_NAME:
                table: object = None if problem else _parsed(data, path)
            elif TABLE.encode() in data:  # tomllib costs 10 ms to import; most projects have no table of ours
                table = _table(data, path, trusted=not problem)
            else:
                continue
            if problem and (name == FILE_NAME or table is not None):
                ignored[path] = problem
            elif isinstance(table, dict):
                return path, table, ignored
        parent = os.path.dirname(folder)
        if parent == folder:
            return None, {}, ignored
        folder = parent


def _read(path: str) -> tuple[bytes, str]:
    """Return a file's bytes, and why they must not be used (others could have written them), or empty."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            problem = ownership_problem(os.fstat(descriptor), private_group=True)
            return file.read(), f"it {problem}" if problem else swap_problem(path, what="it")
    except OSError as error:
        return b"", f"it cannot be read: {error.strerror}"


def _parsed(data: bytes, path: str) -> dict[str, object]:
    import tomllib

    try:
        return tomllib.loads(data.decode())
    except ValueError as error:
        raise SettingsError(
            f"the settings file cannot be read: {error}", where=path, fix="correct the file or remove it"
        ) from error


def _table(data: bytes, path: str, *, trusted: bool) -> dict[str, object] | None:
    """Return our table in a `pyproject.toml`, or None."""
    try:
        tool = _parsed(data, path).get("tool", {})
    except (SettingsError, RecursionError):
        if trusted:
            raise
        return None  # another user's file must not be able to stop an import
    table = tool.get(TABLE) if isinstance(tool, dict) else None
    return table if isinstance(table, dict) else None

"""Checks whether another user could have written or replaced a file or folder.

The cache, the settings file and dumps use these checks. Without user ids (Windows) every check passes.
"""

from __future__ import annotations

import os
import stat

__all__ = ["ownership_problem", "swap_problem"]

_SUPERUSER = 0


def ownership_problem(
    status: os.stat_result, *, links: bool = False, private_group: bool = False, above: bool = False
) -> str:
    """Return why another user could have written this file or folder; empty if none could.

    Args:
        status: the stat result of the file or folder.
        links: it is a symbolic link, whose mode bits mean nothing.
        private_group: allow a group-writable file if the group's only member is this user. Most distributions
            create such a group per user (and set the umask to 002).
        above: it is a parent folder: if it has the sticky bit, others can write there but not replace files.
    """
    if not hasattr(os, "geteuid"):
        return ""
    user = os.geteuid()
    if status.st_uid not in (user, _SUPERUSER):
        return f"belongs to user {status.st_uid}, not to user {user}"
    mode = status.st_mode
    if links or (above and mode & stat.S_ISVTX):
        return ""
    group = mode & stat.S_IWGRP and not (private_group and _is_private(status.st_gid, user))
    if group or mode & stat.S_IWOTH:
        return f"can be written by other users (mode {stat.S_IMODE(mode):04o})"
    return ""


def swap_problem(path: str, *, what: str, owners: bool = False) -> str:
    """Return why another user could replace ``path``; empty if none could.

    Symbolic links, at the path or above it, must belong to this user or to the superuser. Group-writable
    parent folders pass: with one group per user they are common, and callers also check what they opened.

    Args:
        path: absolute; it need not exist.
        what: a name for it in the message (``the cache``).
        owners: also require that each parent folder belongs to this user or the superuser, and that no group
            of several users can write there: for paths that did not exist and so could not be checked.
    """
    if not hasattr(os, "geteuid"):
        return ""
    for place in (path, *_above(path), *_above(os.path.realpath(path))):
        try:
            status = os.lstat(place)
        except OSError:
            continue  # does not exist yet: it is created private
        if stat.S_ISLNK(status.st_mode):
            if problem := ownership_problem(status, links=True):
                return f"the symbolic link {place} {problem}"
        elif place == path:
            continue
        elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"{place}, above {what}, can be written by every user and has no sticky bit"
        elif owners and (problem := ownership_problem(status, private_group=True, above=True)):
            return f"{place}, above {what}, {problem}"
    return ""


def _above(path: str) -> list[str]:
    places = []
    while path != (path := os.path.dirname(path)):
        places.append(path)
    return places


def _is_private(group: int, user: int) -> bool:
    """Return whether a group is private to this user, by the rule with which login programs set the umask.

    It is the user's primary group, has the user's name, and lists no other member.
    """
    import grp
    import pwd

    try:
        entry, members = pwd.getpwuid(user), grp.getgrgid(group)
    except (KeyError, OSError):
        return False
    own = entry.pw_gid == group and members.gr_name == entry.pw_name
    return own and not set(members.gr_mem) - {entry.pw_name}

"""Whether another user could have written a file or folder, or could put another one in its place.

The cache, the settings file and dumps follow these rules. Where the system has no user ids (Windows), nothing
is a problem.
"""

from __future__ import annotations

import os
import stat

__all__ = ["ownership_problem", "swap_problem"]

_SUPERUSER = 0


def ownership_problem(
    status: os.stat_result, *, links: bool = False, private_group: bool = False, above: bool = False
) -> str:
    """Why another user could have written this file or folder; empty when none could.

    Args:
        status: of the file or folder.
        links: it is that of a symbolic link, whose mode bits mean nothing.
        private_group: let the group write where it holds this user alone, as most distributions make one for
            each user (and a umask of 002 with it).
        above: it is that of a folder above: where it has a sticky bit, others may write but not replace.
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
    """Why another user could put something else in the place of ``path``; empty when none could.

    Symbolic links, in its place or above it, have to belong to this user or to the superuser. Group-writable
    folders above it pass: with one group a user they are the rule, and whoever asks looks at what it has
    opened, too.

    Args:
        path: absolute; it need not exist.
        what: what it is, for the message (``the cache``).
        owners: each folder above has to be this user's or the superuser's, and no group of several users
            may write in it: for what is made there and was not there to be looked at.
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
    """Whether a group is this user's own, by the rule that login programs set the umask by.

    It is the primary group, bears the user's name, and lists no other member.
    """
    import grp
    import pwd

    try:
        entry, members = pwd.getpwuid(user), grp.getgrgid(group)
    except (KeyError, OSError):
        return False
    own = entry.pw_gid == group and members.gr_name == entry.pw_name
    return own and not set(members.gr_mem) - {entry.pw_name}

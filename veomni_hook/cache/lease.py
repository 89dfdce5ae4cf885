"""Marks entries as in use: a shared flock on the entry's lock file, held until the process ends.

`clear` removes only entries that it can lock exclusively. The descriptors are kept in one table per process
and are inherited by fork, so an entry stays in use as long as any process that got it lives. On a file system
without locks, entries are used unlocked, and `clear` removes none. Without flock (Windows), the open
descriptor itself keeps the entry's folder from being moved.
"""

from __future__ import annotations

import errno
import os

from veomni_hook.cache.trusted_folder import Defect, Root, Vanished

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK_NAME", "InUse", "claim", "keep", "release", "share"]

LOCK_NAME = ".lease"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
# (device, inode) of the lock file -> (descriptor, root). `setdefault` is atomic; a lock could stay locked in
# a forked child.
_held: dict[tuple[int, int], tuple[int, str]] = {}


class InUse(Defect):
    """An entry cannot be locked exclusively."""


def share(root: Root, entry: str, *, create: bool = False) -> int:
    """A descriptor that marks `entry` as in use while it is open.

    Raises Vanished when the entry is missing or being removed (`create` makes the lock file), Defect when the
    lock file cannot be trusted.
    """
    descriptor = root.open_file(f"{entry}/{LOCK_NAME}", create=create)
    try:
        _lock(descriptor, alone=False)
        present = _is_lock_of(root, entry, descriptor)
    except OSError as error:
        os.close(descriptor)
        raise Vanished(f"{root.full(entry)} is just being removed ({error.strerror})") from error
    if not present:
        os.close(descriptor)
        raise Vanished(f"{root.full(entry)} was just removed")
    return descriptor


def claim(root: Root, entry: str) -> int | None:
    """A descriptor that locks `entry` exclusively (None without flock); raises InUse or OSError."""
    descriptor = root.open_raw(f"{entry}/{LOCK_NAME}", os.O_RDWR | os.O_CREAT)
    if fcntl is None:
        os.close(descriptor)  # an open descriptor, ours or another's, keeps the folder from being moved
        return None
    try:
        if not _lock(descriptor, alone=True):
            raise InUse("this file system has no locks, so it is unknown whether the entry is in use")
        present = _is_lock_of(root, entry, descriptor)
    except OSError as error:
        os.close(descriptor)
        raise InUse("a running process uses it") from error
    except InUse:
        os.close(descriptor)
        raise
    if not present:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "another `clear` was faster", root.full(entry))
    return descriptor


def keep(descriptor: int, root: str) -> None:
    """Hold a descriptor from `share` until this process ends, one per entry; a second one is closed."""
    status = os.fstat(descriptor)
    kept, _ = _held.setdefault((status.st_dev, status.st_ino), (descriptor, root))
    if kept != descriptor:
        os.close(descriptor)


def release(root: str) -> None:
    """Release everything held below `root`: only for a folder that this process is about to remove."""
    for key, (descriptor, holder) in list(_held.items()):
        if holder == root and _held.pop(key, None) is not None:
            os.close(descriptor)


def _is_lock_of(root: Root, entry: str, descriptor: int) -> bool:
    """Whether a lock file is still the entry's: `clear` may have moved it before we got the lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), root.status(f"{entry}/{LOCK_NAME}"))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, *, alone: bool) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True

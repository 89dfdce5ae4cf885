"""Records the upstream code that a project depends on, and compares it with another release.

A lock is a snapshot of modules: the routed sites with digests of what they compute, the upstream bodies that
configs replace, and the text of both. Only locks are compared: the old one is read from a file, the new one
is made from the installed sources, so the old release need not be installed.
"""

from veomni_hook.tools.lock.changes import LINE, PARAMETER, RENAMED, Change, compare
from veomni_hook.tools.lock.records import Body, Lock, LockedModule, LockedSite, Override, dumps, loads
from veomni_hook.tools.lock.snapshot import overrides_of, snapshot

__all__ = [
    "LINE",
    "PARAMETER",
    "RENAMED",
    "Body",
    "Change",
    "Lock",
    "LockedModule",
    "LockedSite",
    "Override",
    "compare",
    "dumps",
    "loads",
    "overrides_of",
    "snapshot",
]

"""What upstream code a project stands on, recorded, and what became of it in another release.

A lock is a snapshot of modules: the routed sites with digests of what they compute, the upstream bodies that
configs take the place of, and the text of both. Two locks are compared, and nothing else: the old one is read
from a file, the new one is made from the installed sources, so the old release need not be there any more.
"""

from veomni_hook.patches.lock.changes import LINE, Change, compare
from veomni_hook.patches.lock.records import Body, Lock, LockedModule, LockedSite, Override, dumps, loads
from veomni_hook.patches.lock.snapshot import overrides_of, snapshot

__all__ = [
    "LINE",
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

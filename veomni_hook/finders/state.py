"""The one home of the hook's mutable state; tests reset it with `STATE.reset()`.

Nothing here is locked: every value is replaced whole, and the transform is deterministic, so two threads
that compute the same thing store equal results.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from veomni_hook.cache.store import Store
    from veomni_hook.finders.children import Inherited
    from veomni_hook.finders.finder import PatchFinder
    from veomni_hook.finders.handle import Handle
    from veomni_hook.finders.outcome import Outcome
    from veomni_hook.patches.spec import PatchConfig
    from veomni_hook.settings import Resolved


class State:
    """Everything about the hook that changes while the process runs.

    Attributes:
        handles: activations that are not undone, oldest first; the hook is active while there is one.
        finder: the finder on `sys.meta_path`, or None.
        resolved: the settings, once the first target asked for them; None makes the next target resolve them.
        store: the cache, opened with `resolved`.
        registered: configs registered in this process, in order.
        asked: targets that an import asked the finder for; any other loaded target passed it by.
        early: targets that were loaded when the hook became active.
        looked_at: how many modules were loaded, and the last of them, when those that another import hook had
            taken were looked for; None before.
        taken: targets that another import hook was found to have taken.
        outcomes: what became of each target module that was looked for, by name.
        said: what has been warned about, once a process.
        process: the process that loaded the hook; in what is forked from it, `os.getpid()` is another.
        announced: patched modules of which `banner` has said what is patched, or decided to say nothing.
        inherited: what activation put into this process's environment for its children, or None.
    """

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.finder: PatchFinder | None = None
        self.resolved: Resolved | None = None
        self.store: Store | None = None
        self.registered: list[PatchConfig] = []
        self.asked: set[str] = set()
        self.early: frozenset[str] = frozenset()
        self.taken: set[str] = set()
        self.looked_at: tuple[int, str] | None = None
        self.outcomes: dict[str, Outcome] = {}
        self.said: set[str] = set()
        self.announced: set[str] = set()
        self.process = os.getpid()
        self.inherited: Inherited | None = None

    def reset(self) -> None:
        """Back to the state of a fresh process; loaded modules stay as they are."""
        import sys

        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.__init__()  # type: ignore[misc]


STATE = State()

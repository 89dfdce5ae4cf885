"""All mutable state of the hook; tests reset it with `STATE.reset()`.

Nothing here is locked: every value is replaced as a whole, and the transform is deterministic, so two threads
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
        resolved: the settings, once the first target needed them; None makes the next target resolve them.
        store: the cache, opened with `resolved`.
        registered: configs registered in this process, in order.
        asked: targets that an import requested from the finder; any other loaded target bypassed it.
        early: targets that were loaded when the hook became active.
        looked_at: the number of loaded modules and the last of them at the latest search for targets taken
            by another import hook; None before the first search.
        taken: targets found to be taken by another import hook.
        adopted: modules with models that `veomni_hook.adopt` has patched.
        outcomes: the outcome of each requested target module, by name.
        said: warnings already given in this process.
        process: the id of the process that loaded the hook; differs from `os.getpid()` in forked processes.
        announced: patched modules for which `banner` has printed its line, or decided not to.
        inherited: what activation added to this process's environment for its children, or None.
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
        self.adopted: set[str] = set()
        self.looked_at: tuple[int, str] | None = None
        self.outcomes: dict[str, Outcome] = {}
        self.said: set[str] = set()
        self.announced: set[str] = set()
        self.process = os.getpid()
        self.inherited: Inherited | None = None

    def reset(self) -> None:
        """Restore the state of a fresh process; loaded modules are not changed."""
        import sys

        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.__init__()  # type: ignore[misc]


STATE = State()

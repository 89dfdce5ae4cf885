"""All mutable state of the hook; tests reset it with `STATE.reset()`.

Nothing here is locked: every value is replaced as a whole, and the transform is deterministic, so two threads
that compute the same thing store equal results.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from _typeshed.importlib import MetaPathFinderProtocol

    from veomni_hook.cache.store import Store
    from veomni_hook.finders.children import Inherited
    from veomni_hook.finders.outcome import Outcome
    from veomni_hook.patches.spec import PatchConfig
    from veomni_hook.settings import Resolved


class State:
    """Everything about the hook that changes while the process runs.

    Attributes:
        handles: activations that are not undone, oldest first, with the settings given to each; the hook is
            active while there is one.
        finder: the hook's finder, on `sys.meta_path` while the hook is active; None before that.
        resolved: the settings, once the first target needed them; None makes the next target resolve them.
        store: the cache, opened with `resolved`.
        registered: configs registered in this process, in order.
        registered_names: names of modules that registered configs patch and that are no targets.
        registered_patterns: tests, one per registered config with a pattern, whether a name matches it.
        named: the processing and configuration modules that configs name, as names and patterns, once the
            first such module was imported; None before that.
        asked: targets that an import requested from the finder; any other loaded target bypassed it.
        already_imported: targets that were loaded when the hook became active.
        unused: those of them of whose classes nothing is made yet.
        unsettled: targets served unpatched because a module that their configs need was being imported, with
            that module's name; they are imported again once it is complete.
        looking: whether the finder is looking for targets that other hooks took, which imports modules.
        looked_at: the number of loaded modules and the last of them when it last looked; None before that.
        taken: targets found to be taken by another import hook.
        adopted: modules with models that `veomni_hook.adopt` has patched.
        outcomes: the outcome of each requested target module, by name.
        said: warnings already given in this process.
        process: the id of the process that loaded the hook; differs from `os.getpid()` in forked processes.
        announced: patched modules for which `banner` has printed its line, or decided not to.
        recorded: what loading configs has seen in this process, see `veomni_hook.cache.inputs`.
        unrecorded: why that is not everything that they depend on; empty if it is.
        executed: the modules that were imported while configs loaded, so that what they saw is recorded.
        config_packages: the packages of configs, whose files count also where they are installed.
        pinned: what `veomni_hook.finders.installed` has found, by package and file.
        inherited: what activation added to this process's environment for its children, or None.
    """

    def __init__(self) -> None:
        self.handles: dict[object, Mapping[str, object]] = {}
        self.finder: MetaPathFinderProtocol | None = None
        self.resolved: Resolved | None = None
        self.store: Store | None = None
        self.registered: list[PatchConfig] = []
        self.registered_names: frozenset[str] = frozenset()
        self.registered_patterns: tuple[Callable[[str], bool], ...] = ()
        self.named: frozenset[str] | None = None
        self.asked: set[str] = set()
        self.already_imported: frozenset[str] = frozenset()
        self.unused: set[str] = set()
        self.unsettled: dict[str, str] = {}
        self.looking = False
        self.looked_at: tuple[int, str] | None = None
        self.taken: set[str] = set()
        self.adopted: set[str] = set()
        self.outcomes: dict[str, Outcome] = {}
        self.said: set[str] = set()
        self.process = os.getpid()
        self.announced: set[str] = set()
        self.recorded: dict[tuple[str, str], str] = {}
        self.unrecorded = ""
        self.executed: set[str] = set()
        self.config_packages: set[str] = set()
        self.pinned: dict[tuple[str, str], tuple[bool, str]] = {}
        self.inherited: Inherited | None = None

    def is_registered(self, name: str) -> bool:
        """Whether a registered config patches this module, which is no target."""
        if name in self.registered_names:
            return True
        return bool(self.registered_patterns) and any(applies(name) for applies in self.registered_patterns)

    def reset(self) -> None:
        """Restore the state of a fresh process; loaded modules are not changed."""
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.__init__()  # type: ignore[misc]


STATE = State()

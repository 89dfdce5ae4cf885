"""The process-wide choice of kernels, and the switch that turns all slots off.

``epoch`` changes with every setting; slots compare it to know when to look their kernels up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

from veomni_hook.kernels.selection.choice import Choice, parse_choice
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.registry import registry

__all__ = ["STATE", "State", "get_choice", "set_active", "set_choice"]


class State:
    """Mutable process state of `veomni_hook.kernels`; tests restore it.

    Attributes:
        choice: the choice in the settings.
        contexts: the choices of all open `use_kernels` blocks, outermost first.
        active: whether slots answer, and patched code may differ from upstream's.
        wanted: the resulting choice for every op. Plain strings, so that code under ``torch.compile``
            depends on nothing else.
        answering: whether patched code may leave out work for which no slot is asked
            (`veomni_hook.kernels.causal_mask`): False where ``eager`` is chosen for all ops, or slots do not
            answer. What keeps results right depends on ``active`` alone: boundaries of samples, towers that
            other processes wait for.
        asked: callback that runs whenever kernels are selected for a slot, which happens at a call. Its
            arguments: the patched module's name; a torch device type, or None if no kernel is possible on
            any device; whether ``torch.compile`` is tracing the call.
        created: callback that runs whenever a slot is created: a patched module is being imported, and what
            it imports has been.
    """

    def __init__(self) -> None:
        self.choice = Choice()
        self.contexts: tuple[Choice, ...] = ()
        self.active = True
        self.wanted: dict[str, str] = {}
        self.answering = True
        self.asked: Callable[[str, str | None, bool], None] | None = None
        self.created: Callable[[], None] | None = None
        self.epoch = 0

    @property
    def effective(self) -> Choice:
        """The choice for unbound modules."""
        effective = self.choice
        for choice in self.contexts:
            effective = choice.over(effective)
        return effective

    def changed(self) -> None:
        """Make slots look their kernels up again."""
        effective = self.effective
        self.wanted = {op: effective.backend(op) if self.active else EAGER for op in registry.names()}
        self.answering = self.active and effective.preset != EAGER
        self.epoch += 1

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo, at the end of the block, what is chosen or switched in it, as tests do."""
        before = self.choice, self.contexts, self.active
        try:
            yield
        finally:
            self.choice, self.contexts, self.active = before
            self.changed()


STATE = State()


def set_choice(text: str, *, invariant: bool = False) -> None:
    """Choose kernels for this process, e.g. ``auto``, ``rms_norm=torch``. Raises KernelError if not valid.

    ``invariant`` leaves only kernels whose rows have the same bits in any batch.

    Every import of a patched module calls this with the choice in force; slots look their kernels up again
    only if the choice differs.
    """
    registry.refresh()  # enabling or disabling plugins changes the version
    choice = replace(_parsed(text, registry.version), invariant=invariant)
    if choice != STATE.choice:
        STATE.choice = choice
        STATE.changed()


@lru_cache(maxsize=8)
def _parsed(text: str, version: int) -> Choice:
    """Return the parsed choice; ``version`` is the registry's, as part of the cache key."""
    return parse_choice(text)


def get_choice() -> str:
    """Return the choice in the form that `set_choice` takes."""
    return str(STATE.choice)


def set_active(active: bool) -> None:
    """Let slots answer (the default), or make every guard fall through to the upstream code."""
    if STATE.active != active:
        STATE.active = active
        STATE.changed()

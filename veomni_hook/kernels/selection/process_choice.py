"""The process-wide choice of kernels, and the switch that turns all slots off.

``epoch`` changes with every setting; slots compare it to know when to look their kernels up again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

from veomni_hook.kernels.selection.choice import AUTO, Choice, parse_choice
from veomni_hook.kernels.selection.declaration import EAGER, RESERVED
from veomni_hook.kernels.selection.registry import registry

__all__ = ["STATE", "State", "asked_for", "set_active", "set_choice", "unchosen"]


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
        named: callback that runs whenever kernels are chosen, with the ops for which a backend is named.
        precision: the setting of this name (`veomni_hook.kernels.float8`).
        created: callback that runs whenever a slot is created: a patched module is being imported, and what
            it imports has been.
    """

    def __init__(self) -> None:
        self.choice = Choice()
        self.contexts: tuple[Choice, ...] = ()
        self.active = True
        self.wanted: dict[str, str] = {}
        self.answering = True
        self.precision = ""
        self.asked: Callable[[str, str | None, bool], None] | None = None
        self.named: Callable[[Collection[str]], None] | None = None
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
        self.tell_named(self.wanted)

    def tell_named(self, wanted: Mapping[str, str | None]) -> None:
        """Tell for which ops a choice names a backend."""
        if self.named is not None and (ops := [op for op, name in wanted.items() if name not in _UNNAMED]):
            self.named(ops)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo, at the end of the block, what is chosen or switched in it, as tests do."""
        before = self.choice, self.contexts, self.active
        try:
            yield
        finally:
            self.choice, self.contexts, self.active = before
            self.changed()


_UNNAMED = (*RESERVED, None)
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


def asked_for(text: str) -> tuple[str, ...]:
    """Return the ops of which ``auto`` takes no declared kernel, and of which the choice ``text`` wants one.

    It names a backend, or ``auto`` takes a kernel that was added. Raises KernelError if it is not valid.
    """
    registry.refresh()
    return _asked_for(text, registry.version)


@lru_cache(maxsize=8)
def _asked_for(text: str, version: int) -> tuple[str, ...]:
    choice, loaded = _parsed(text, version), registry.loaded()

    def wants(op: str) -> bool:
        if (name := choice.backend(op)) != AUTO:
            return name != EAGER
        return op in loaded and any(kernel.automatic for kernel in registry.kernels(op))

    return tuple(op for op in registry.names() if wants(op) and registry.by_name(op))


def unchosen(op: str, text: str) -> str:
    """Return why no kernel of ``op`` runs, because none is named in the choice ``text``; otherwise ""."""
    if op not in registry.names() or op in asked_for(text):
        return ""
    names = ", ".join(registry.by_name(op))
    return names and f"auto uses none of its kernels; name one before the module is imported: {names}"


@lru_cache(maxsize=8)
def _parsed(text: str, version: int) -> Choice:
    """Return the parsed choice; ``version`` is the registry's, as part of the cache key."""
    return parse_choice(text)


def set_active(active: bool) -> None:
    """Let slots answer (the default), or make every guard fall through to the upstream code."""
    if STATE.active != active:
        STATE.active = active
        STATE.changed()

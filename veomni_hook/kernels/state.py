"""The one home of what a process has chosen: the kernels, and whether slots answer at all.

``epoch`` changes with every setting; slots compare it and look their kernels up again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from veomni_hook.kernels.choice import Choice, parse_choice
from veomni_hook.kernels.registry import EAGER, registry

__all__ = ["STATE", "State", "get_choice", "set_active", "set_choice"]


class State:
    """Mutable process state of `veomni_hook.kernels`; tests make their own or restore this one.

    Attributes:
        choice: what settings say.
        contexts: what every `use_kernels` that is open says, the outer ones first.
        active: whether slots answer.
        wanted: what all of it comes to for every op. Plain strings, so that code under ``torch.compile``
            depends on nothing else.
        asked: told the name of a patched module and a torch device type whenever kernels are chosen for one
            of its slots, which is at a call; no device where none comes into question on any. Last, whether
            it is a call that ``torch.compile`` traces.
    """

    def __init__(self) -> None:
        self.choice = Choice()
        self.contexts: tuple[Choice, ...] = ()
        self.active = True
        self.wanted: dict[str, str] = {}
        self.asked: Callable[[str, str | None, bool], None] | None = None
        self.epoch = 0

    @property
    def effective(self) -> Choice:
        """The choice for modules that are bound to none of their own."""
        found = self.choice
        for choice in self.contexts:
            found = choice.over(found)
        return found

    def changed(self) -> None:
        """Make slots look anew."""
        effective = self.effective
        self.wanted = {op: effective.backend(op) if self.active else EAGER for op in registry.ops()}
        self.epoch += 1


STATE = State()


def set_choice(text: str) -> None:
    """Choose kernels for this process, e.g. ``auto``, ``rms_norm=torch``. Raises KernelError if not valid.

    Every patched module that is imported asks for the choice in force; only another one
    makes slots look anew.
    """
    registry.ops()  # plugins that came into force or went out of it make another version
    choice = _parsed(text, registry.version)
    if choice != STATE.choice:
        STATE.choice = choice
        STATE.changed()


@lru_cache(maxsize=8)
def _parsed(text: str, version: int) -> Choice:
    """The choice that ``text`` is where the registry holds what it holds in this version."""
    return parse_choice(text)


def get_choice() -> str:
    """Return the choice in the form that `set_choice` takes."""
    return str(STATE.choice)


def set_active(active: bool) -> None:  # noqa: FBT001 - the hook's switch has two positions
    """Let slots answer (the default), or make every guard fall through to the upstream code."""
    if STATE.active != active:
        STATE.active = active
        STATE.changed()

"""The one home of what a process has chosen: the kernels, and whether slots answer at all.

``epoch`` changes with every setting; slots compare it and look their kernels up again.
"""

from __future__ import annotations

from functools import lru_cache

from veomni_hook.kernels.choice import Choice, parse_choice
from veomni_hook.kernels.registry import registry

__all__ = ["STATE", "State", "get_choice", "set_active", "set_choice"]


class State:
    """Mutable process state of `veomni_hook.kernels`; tests make their own or restore this one."""

    def __init__(self) -> None:
        self.choice = Choice()
        self.active = True
        self.epoch = 0


STATE = State()


def set_choice(text: str) -> None:
    """Choose kernels for this process, e.g. ``auto``, ``rms_norm=torch``. Raises KernelError if not valid.

    Every patched module that is imported asks for the choice in force; only another one
    makes slots look anew.
    """
    choice = _parsed(text, registry.version)
    if choice != STATE.choice:
        STATE.choice = choice
        STATE.epoch += 1


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
        STATE.epoch += 1

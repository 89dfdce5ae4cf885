"""What the hook tells the slots of patched modules: whether it is active, and which kernels are wanted."""

from __future__ import annotations

from veomni_hook.finders.banner import kernels_are_chosen
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.kernels.selection import process_choice as kernels
from veomni_hook.parallel import process

__all__ = ["bind_slots"]


def bind_slots() -> None:
    """Pass the settings in force to all slots, also to those of modules that are imported later.

    The sizes of parallel axes go to `veomni_hook.parallel.process`.

    Raises:
        KernelError: the kernel choice names an unknown op or backend.
    """
    if STATE.handles:
        kernels.STATE.asked = kernels_are_chosen
        kernels.set_choice(current_settings().kernels)
        process.tell(current_settings().parallel)
    else:
        process.tell("")
    kernels.set_active(active=bool(STATE.handles))

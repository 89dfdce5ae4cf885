"""What the hook tells the slots of patched modules: whether it is active, and which kernels are wanted."""

from __future__ import annotations

from veomni_hook.batch_invariance import mode
from veomni_hook.errors import SettingsError
from veomni_hook.finders.banner import kernels_are_chosen, memory_is_chosen
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.kernels.selection import process_choice as kernels
from veomni_hook.memory import parts
from veomni_hook.parallel import process
from veomni_hook.settings import BATCH_INVARIANT

__all__ = ["bind_slots"]


def bind_slots() -> None:
    """Pass the settings in force to all slots, also to those of modules that are imported later.

    The sizes of parallel axes go to `veomni_hook.parallel.process`, the parts of the setting `memory` to
    `veomni_hook.memory.parts`, the setting `deterministic` to
    `veomni_hook.batch_invariance.mode`.

    Raises:
        KernelError: the kernel choice names an unknown op or backend.
        SettingsError: the batch-invariant mode needs a newer torch, or products that are not in float8.
    """
    if STATE.handles:
        settings = current_settings()
        kernels.STATE.asked = kernels_are_chosen
        invariant = settings.deterministic == BATCH_INVARIANT
        kernels.set_choice(settings.kernels, invariant=invariant)
        mode.switch(on=invariant)
        kernels.STATE.created = mode.replace_attention if invariant else None
        process.tell(settings.parallel)
        if settings.precision and settings.deterministic:
            raise SettingsError(
                "products in float8 are not batch-invariant",
                where=f"precision={settings.precision}, deterministic={settings.deterministic}",
                fix="leave one of the two settings out",
            )
        kernels.STATE.precision = settings.precision
        parts.tell(settings.memory, shared=bool(settings.parallel), say=memory_is_chosen)
    else:
        process.tell("")
        parts.tell("")
        kernels.STATE.precision = ""
        mode.switch(on=False)
        kernels.STATE.created = None
    kernels.set_active(active=bool(STATE.handles))

"""Slots: the objects that patched code asks for a kernel. Patched modules import `Slot` from here."""

from __future__ import annotations

from veomni_hook.kernels.slot.candidates import Outcome
from veomni_hook.kernels.slot.liger_warning import warn_of_first_call
from veomni_hook.kernels.slot.record import FIRST_CALL
from veomni_hook.kernels.slot.slot import Slot

__all__ = ["Outcome", "Slot"]

FIRST_CALL.append(warn_of_first_call)

"""Tells whether a user chose ``attn_implementation``, or transformers replaced None by its default.

The config's value cannot tell: transformers writes ``"eager"`` over None where it cannot use its fused
attention. Patched transformers records the user's values here
(`veomni_hook.kernels.shared.recorded_choice`). The user's choice overrides ``auto``; a kernel that
``VEOMNI_KERNELS`` selects by name overrides both.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.shared.recorded_choice import RecordedChoice, is_watched

__all__ = ["bypassed", "forget_choice", "note_assignment", "note_request", "overridden", "users_choice"]

_RECORD = RecordedChoice("attn")
note_assignment = _RECORD.note_assignment
note_request = _RECORD.note_request
forget_choice = _RECORD.forget_choice
#: This choice leaves the kernel to torch, and the one that a slot has for it is torch's.
_TORCH = "sdpa"


def users_choice(owner: object, *operands: object) -> str | None:
    """Return why ``auto`` leaves the attention module ``owner`` to transformers, or None without a choice."""
    config = getattr(owner, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        return None
    if config._attn_implementation == _TORCH:
        return None
    chosen = vars(config).get(_RECORD.key)
    if chosen is not None:
        return f"attn_implementation={chosen!r} was chosen"
    used = config._attn_implementation
    if used not in (None, EAGER):
        return f"transformers uses attn_implementation={used!r}"
    if used is not None and not is_watched(type(config), "attn"):
        return (
            f"attn_implementation={used!r} may have been chosen: "
            "transformers was imported before veomni_hook, so the choice is unknown"
        )
    return None


def bypassed(owner: object, variant: str) -> str | None:
    """Return why, under ``auto``, no kernel of ``variant`` is asked for the module ``owner``, or None."""
    used = getattr(getattr(owner, "config", None), "_attn_implementation", None)
    if used == _TORCH and variant != "sliding_window":
        # The slot is in the place of the eager function, which transformers does not call.
        return f"transformers uses attn_implementation={used!r}"
    return users_choice(owner)


def overridden(owner: object, wanted: str) -> str | None:
    """Return the ``attn_implementation`` that ``wanted``, a backend selected by name, overrides."""
    chosen = vars(getattr(owner, "config", object)).get(_RECORD.key)
    return None if chosen is None or wanted == EAGER else f"attn_implementation={chosen!r}"

"""Tells whether a user chose ``experts_implementation``, or transformers replaced None by its default.

The config's value cannot tell: transformers writes ``"grouped_mm"`` over None. Patched transformers records
the user's values here (`veomni_hook.kernels.shared.recorded_choice`).

The user's choice overrides ``auto``. A kernel that ``VEOMNI_KERNELS`` selects by name overrides both.
"""

from __future__ import annotations

from typing import Any

from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.shared.recorded_choice import RecordedChoice, is_watched

__all__ = [
    "OURS",
    "chose_ours",
    "forget_choice",
    "note_assignment",
    "note_request",
    "overridden",
    "users_choice",
]

#: The name of this package's kernels in transformers' list.
OURS = "veomni"
_RECORD = RecordedChoice("experts")
_CHOICE = _RECORD.key
note_assignment = _RECORD.note_assignment
note_request = _RECORD.note_request
forget_choice = _RECORD.forget_choice


def users_choice(owner: object, *operands: object) -> str | None:
    """Return why ``auto`` leaves the experts module ``owner`` to transformers, or None without a choice.

    Only an ``owner`` with the ``config`` that ``@use_experts_implementation`` reads can have a choice.
    """
    config = getattr(owner, "config", None)
    if config is None or not hasattr(config, "_experts_implementation") or chose_ours(owner):
        return None
    chosen = vars(config).get(_CHOICE)
    if chosen is not None:
        return f"experts_implementation={chosen!r} was chosen"
    kind: Any = type(config)
    if not is_watched(kind, "experts") and config._experts_implementation is not None:
        return (
            f"experts_implementation={config._experts_implementation!r} may have been chosen: "
            "transformers was imported before veomni_hook, so the choice is unknown"
        )
    return None


def overridden(owner: object, wanted: str) -> str | None:
    """Return the ``experts_implementation`` that ``wanted``, a backend selected by name, overrides."""
    if chose_ours(owner):
        return f"experts_implementation={OURS!r}"
    chosen = vars(getattr(owner, "config", object)).get(_CHOICE)
    return None if chosen is None or wanted == EAGER else f"experts_implementation={chosen!r}"


def chose_ours(owner: object) -> bool:
    """Whether transformers' ``experts_implementation`` selects this package's kernels."""
    return getattr(getattr(owner, "config", None), "_experts_implementation", None) == OURS

"""What PEFT's adapters are told to do."""

from __future__ import annotations

__all__ = ["inactive"]


def inactive(layer: object) -> str | None:
    """Return why the adapters of one of PEFT's layers are not computed now, or None."""
    if getattr(layer, "disable_adapters", False):
        return "disabled"
    if getattr(layer, "merged", False):
        return "merged into the weight by PEFT"
    return None

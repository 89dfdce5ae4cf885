"""The names of patchgen's patch specs, made of our own classes; the hook serves them to config modules.

A config of this `PatchConfig` is lenient: it follows patchgen's rules, see `veomni_hook.patches.adopt`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from veomni_hook.patches import spec
from veomni_hook.patches.records import (
    ImportSpec,
    Patch,
    PatchType,
    PositionedHelper,
    create_patch_from_external,
)

__all__ = [
    "ImportSpec",
    "Patch",
    "PatchConfig",
    "PatchType",
    "PositionedHelper",
    "create_patch_from_external",
]


@dataclass(eq=False)
class PatchConfig(spec.PatchConfig):
    """A config whose verbs take what patchgen's take, in the same order."""

    lenient: bool = field(default=True, kw_only=True, repr=False)

    def modify_init(self, target_class: str, description: str | None = None) -> Any:  # type: ignore[override]
        """Run ``function(original_init, self, *args, **kwargs)`` as the class's ``__init__``."""
        return super().modify_init(target_class, description=description)

"""What patching a module did: the one source of the header, of `explain` and of the manifest.

Made from what was applied, never from what was declared. Plain data that survives JSON unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from veomni_hook.patches.spec import SlotSpec

__all__ = ["AppliedPatch", "PatchReport", "YieldedPatch", "one_line"]

_DECORATOR = re.compile(r"@(?=\w)")


@dataclass(frozen=True, slots=True)
class AppliedPatch:
    """A patch that took effect.

    ``kind`` is a `PatchType` value, or ``helper``, ``post_import_block``, ``drop_import``, ``exclude``;
    ``reason`` its description; ``config`` the ``module:name`` of the config that declares it; ``lines`` the
    first and last line, from 1, that it shaped in the patched text (equal numbers around nothing left).
    """

    kind: str
    target: str
    reason: str
    config: str
    lines: tuple[int, int]


@dataclass(frozen=True, slots=True)
class YieldedPatch:
    """A built-in patch that gave way; ``reason`` says to what."""

    kind: str
    target: str
    reason: str
    config: str


@dataclass(frozen=True, slots=True)
class PatchReport:
    """Everything that happened to one module.

    ``untouched`` names the top-level definitions that are upstream's text byte for byte.
    """

    module: str
    version: str
    applied: tuple[AppliedPatch, ...] = ()
    yielded: tuple[YieldedPatch, ...] = ()
    untouched: tuple[str, ...] = ()
    slots: tuple[SlotSpec, ...] = ()
    distribution: str = "transformers"

    def moved(self, lines: int) -> PatchReport:
        """The same report for a text with ``lines`` more lines in front, as the header puts there."""
        return replace(
            self,
            applied=tuple(
                replace(patch, lines=(patch.lines[0] + lines, patch.lines[1] + lines))
                for patch in self.applied
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PatchReport:
        """Rebuild a report from `to_dict`, before or after JSON.

        Raises:
            KeyError, TypeError: ``data`` is no report of this version.
        """
        return cls(
            module=data["module"],
            version=data["version"],
            applied=tuple(
                AppliedPatch(**{**patch, "lines": _pair(patch["lines"])}) for patch in data["applied"]
            ),
            yielded=tuple(YieldedPatch(**patch) for patch in data["yielded"]),
            untouched=tuple(data["untouched"]),
            slots=tuple(SlotSpec(**slot) for slot in data["slots"]),
            distribution=data["distribution"],
        )


def one_line(text: str) -> str:
    """Return ``text`` fit for one comment line.

    White space is folded, and a decorator loses its ``@``: transformers decides by the text
    ``@use_experts_implementation`` in a module's source, and a comment must not decide that.
    """
    return _DECORATOR.sub("", " ".join("".join(c if c.isprintable() else " " for c in text).split()))


def _pair(lines: Any) -> tuple[int, int]:
    start, end = lines
    return int(start), int(end)

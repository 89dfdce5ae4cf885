"""What patching a module did: the single source for the header, `explain` and the manifest.

Built from what was applied, never from what was declared. Plain data that survives JSON unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from veomni_hook.patches.spec import SlotSpec

__all__ = ["AppliedPatch", "MissedSite", "PatchReport", "Remark", "YieldedPatch"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What happened to one step of a config.

    ``kind`` is a `PatchType` value, or ``helper``, ``post_import_block``, ``drop_import``, ``exclude``.
    ``config`` is the ``module:name`` of the config that declares it; ``op`` and ``variant`` are a
    route's.
    """

    kind: str
    target: str
    reason: str
    config: str
    op: str = ""
    variant: str = ""


@dataclass(frozen=True, slots=True)
class YieldedPatch(_Entry):
    """A built-in patch or a route that yielded; ``reason`` says to what."""


@dataclass(frozen=True, slots=True)
class AppliedPatch(_Entry):
    """A patch that took effect; ``reason`` is its description.

    ``lines`` is the first and last line in the patched text that it changed, counted from 1 (equal if no text
    is left). ``declared`` is the target pattern that matched ``target``.
    """

    lines: tuple[int, int] = field(kw_only=True)
    declared: str = ""


@dataclass(frozen=True, slots=True)
class MissedSite:
    """Code that looks like an op and is not routed to a kernel: a row of `veomni_hook.tools.coverage`."""

    op: str
    target: str
    status: str
    reason: str
    code: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class Remark:
    """Something to know about a patch that applies.

    Either it is wrong, and patchgen accepts it: ``what``, ``where`` and ``fix`` are those of the error that
    other configs get. Or it is ``harmless``: the patch means what it meant. ``target`` is what it names.
    """

    config: str
    target: str
    what: str
    where: str
    fix: str
    harmless: bool = False

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.where}\n  fix:   {self.fix}"


@dataclass(frozen=True, slots=True)
class PatchReport:
    """Everything that happened to one module.

    ``untouched`` names the top-level definitions that equal upstream byte for byte; ``missed`` lists the
    idioms' candidates that are not routed to a kernel; ``remarks`` is what to know about configs. Of configs
    made for patchgen: ``companions`` are the modules that their code imports at module level, and ``wanting``
    those of external replacements that are not installed.
    """

    module: str
    version: str
    applied: tuple[AppliedPatch, ...] = ()
    yielded: tuple[YieldedPatch, ...] = ()
    untouched: tuple[str, ...] = ()
    slots: tuple[SlotSpec, ...] = ()
    missed: tuple[MissedSite, ...] = ()
    distribution: str = "transformers"
    remarks: tuple[Remark, ...] = ()
    companions: tuple[str, ...] = ()
    wanting: tuple[str, ...] = ()

    def moved(self, lines: int) -> PatchReport:
        """The same report for a text with ``lines`` more lines in front, such as the header."""
        return replace(
            self,
            applied=tuple(
                replace(patch, lines=(patch.lines[0] + lines, patch.lines[1] + lines))
                for patch in self.applied
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values; optional fields are omitted from entries that lack them."""
        data = asdict(self)
        for name in ("applied", "yielded", "slots"):
            optional = {"declared", "parameters", "skips", *(("op", "variant") if name != "slots" else ())}
            data[name] = [
                {key: value for key, value in entry.items() if value or key not in optional}
                for entry in data[name]
            ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PatchReport:
        """Rebuild a report from `to_dict`, before or after JSON.

        Raises:
            KeyError, TypeError: ``data`` is not a report of this version.
        """
        return cls(
            module=data["module"],
            version=data["version"],
            applied=tuple(
                AppliedPatch(**{**patch, "lines": (start, end)})
                for patch in data["applied"]
                for start, end in [patch["lines"]]
            ),
            yielded=tuple(YieldedPatch(**patch) for patch in data["yielded"]),
            untouched=tuple(data["untouched"]),
            slots=tuple(
                SlotSpec(**{**slot, "skips": tuple((place, tuple(names)) for place, names in skips)})
                for slot in data["slots"]
                for skips in [slot.get("skips", ())]
            ),
            missed=tuple(MissedSite(**site) for site in data["missed"]),
            distribution=data["distribution"],
            remarks=tuple(Remark(**remark) for remark in data["remarks"]),
            companions=tuple(data["companions"]),
            wanting=tuple(data["wanting"]),
        )

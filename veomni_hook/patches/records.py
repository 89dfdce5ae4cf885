"""The records that a config is made of, besides slots, and what a declaration of one may leave out.

Patchgen's fields keep their names, order and defaults; additional fields are keyword-only. Each record
says where it is declared, as ``file:line``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from veomni_hook.patches.site import Site

__all__ = [
    "ImportSpec",
    "NameMap",
    "Patch",
    "PatchType",
    "PositionedHelper",
    "create_patch_from_external",
    "describe",
    "device_of",
    "digests",
    "is_pattern",
    "place_of_caller",
    "place_of_code",
]

NameMap: TypeAlias = Mapping[str, str]


class PatchType(StrEnum):
    """What a patch does to its target; reports and headers print the values."""

    CLASS_REPLACEMENT = "class_replacement"
    METHOD_OVERRIDE = "method_override"
    FUNCTION_REPLACEMENT = "function_replacement"
    ADDITIONAL_IMPORT = "additional_import"
    INIT_MODIFICATION = "init_modification"
    METHOD_ADDITION = "method_addition"
    GUARD = "guard"
    REWRITE = "rewrite"
    ROUTE = "route"
    CLASS_MAPPING = "class_mapping"


@dataclass
class Patch:
    """One declared change of one target (``Class``, ``Class.method``, ``function``).

    ``matches`` is how often ``pattern`` (or ``before``) must match (None: any number of times). ``site`` is
    the site that a route was made from. ``regex``: the target is a regular expression, searched for in names
    of classes. ``weights`` names the conversions of checkpoints that a mapped class needs. ``origin`` is the
    ``file:line`` of the declaration, for messages.
    """

    patch_type: PatchType
    target: str
    replacement: Any
    source_module: str | None = None
    description: str | None = None
    replacement_source: str | None = None
    name_map: NameMap | None = None
    allow_signature_change: bool = field(default=False, kw_only=True)
    before: str | None = field(default=None, kw_only=True)
    pattern: str | None = field(default=None, kw_only=True)
    replacement_text: str | None = field(default=None, kw_only=True)
    matches: int | None = field(default=1, kw_only=True)
    fingerprints: tuple[str, ...] = field(default=(), kw_only=True)
    relies_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)
    site: Site | None = field(default=None, kw_only=True)
    regex: bool = field(default=False, kw_only=True)
    weights: str = field(default="", kw_only=True)
    origin: str = field(default="", kw_only=True, compare=False)

    def is_for(self, name: str) -> bool:
        """Whether the target, which may be a pattern or an expression, fits a name without ``<locals>``."""
        if self.regex:
            return re.search(self.target, name) is not None
        return fnmatchcase(name, self.target.replace("<locals>.", ""))


@dataclass
class ImportSpec:
    """An import to add: ``from module import names`` (no names: ``*``), or ``import module as alias``."""

    module: str
    names: list[str] | None = None
    alias: str | None = None
    is_from_import: bool = True
    origin: str = field(default="", kw_only=True, compare=False)


@dataclass
class PositionedHelper:
    """A helper that is emitted right after a top-level definition of the source module."""

    target: str
    helper: object
    placement: str = "after"


def create_patch_from_external(
    target: str,
    replacement_module: str,
    replacement_name: str,
    patch_type: PatchType = PatchType.CLASS_REPLACEMENT,
    description: str | None = None,
) -> Patch:
    """Return a patch that replaces the target with ``replacement_name`` from ``replacement_module``.

    Nothing is imported here; the engine checks that the module has the name.
    """
    return Patch(
        patch_type,
        target,
        None,
        source_module=replacement_module,
        description=description or f"Replace {target} with {replacement_name} from {replacement_module}",
        replacement_source=f"{replacement_module}.{replacement_name}",
        origin=place_of_caller(),
    )


def device_of(target_file: str) -> Literal["gpu", "npu"] | None:
    """The device that the name of patchgen's output file says, if it says one."""
    if target_file.endswith("_npu.py"):
        return "npu"
    return "gpu" if target_file.endswith("_gpu.py") else None


def is_pattern(source_module: str) -> bool:
    """Whether a source module is a pattern."""
    return any(character in source_module for character in "*?[")


_DESCRIPTIONS = {
    PatchType.CLASS_REPLACEMENT: "Replace {target} with {name}",
    PatchType.FUNCTION_REPLACEMENT: "Replace {target} with {name}",
    PatchType.METHOD_OVERRIDE: "Override {target}",
    PatchType.METHOD_ADDITION: "Add {target}",
    PatchType.INIT_MODIFICATION: "Modify {target}.__init__",
    PatchType.GUARD: "Guard {target}",
}


def describe(patch_type: PatchType, target: str, replacement: object) -> str:
    """The description of a patch that has none."""
    return _DESCRIPTIONS[patch_type].format(
        target=target, name=getattr(replacement, "__name__", "a replacement")
    )


def digests(fingerprints: Collection[str], relies_on: Mapping[str, Collection[str]] | None) -> dict[str, Any]:
    """The digests in a declaration as fields of its patch; a single one may be given as text."""

    def collected(texts: Collection[str]) -> tuple[str, ...]:
        return (texts,) if isinstance(texts, str) else tuple(texts)

    relied_on = {name: collected(texts) for name, texts in (relies_on or {}).items()}
    return {"fingerprints": collected(fingerprints), "relies_on": relied_on}


_LANGUAGE = (
    "veomni_hook.patches.mappings",
    "veomni_hook.patches.patchgen",
    "veomni_hook.patches.records",
    "veomni_hook.patches.spec",
)


def place_of_caller() -> str:
    """Return ``file:line`` of the code that calls the patch language, where a patch is declared."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _LANGUAGE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of_code(definition: object) -> str:
    """Where a function or class is defined, if the object records it (classes: since Python 3.13)."""
    definition = getattr(definition, "__func__", None) or getattr(definition, "fget", None) or definition
    code = getattr(definition, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    line = getattr(definition, "__firstlineno__", None)
    file = getattr(sys.modules.get(getattr(definition, "__module__", "")), "__file__", None)
    return f"{file}:{line}" if line and file else ""

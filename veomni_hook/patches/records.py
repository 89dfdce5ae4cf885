"""The records that a config is made of, besides slots: patches, imports, helpers.

Patchgen's fields keep their names, order and defaults; additional fields are keyword-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from veomni_hook.patches.places import place_of_caller
from veomni_hook.patches.site import Site

__all__ = [
    "ImportSpec",
    "NameMap",
    "Patch",
    "PatchType",
    "PositionedHelper",
    "create_patch_from_external",
]

NameMap: TypeAlias = Mapping[str, str]


class PatchType(Enum):
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
    helper: Any
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

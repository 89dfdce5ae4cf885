"""The patch language: what a config declares, as plain data.

Light to import; contains no engine code. Fields that VeOmni's patchgen also has keep its names, order and
defaults; additional fields are keyword-only or come last. Every verb works as a decorator and, if
``replacement`` is given, as a direct call. The engine, not this module, checks patches against upstream.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from veomni_hook.patches.mappings import mapping, unmapping
from veomni_hook.patches.records import (
    ImportSpec,
    NameMap,
    Patch,
    PatchType,
    PositionedHelper,
    create_patch_from_external,
    describe,
    device_of,
    digests,
    is_pattern,
    place_of_caller,
    place_of_code,
)
from veomni_hook.patches.site import SlotHandle, SlotSpec

__all__ = [
    "ImportSpec",
    "Patch",
    "PatchConfig",
    "PatchType",
    "PositionedHelper",
    "SlotHandle",
    "SlotSpec",
    "create_patch_from_external",
]

T = TypeVar("T")


@dataclass(eq=False)
class PatchConfig:
    """The patches of one module.

    Args:
        source_module: dotted name of the module to patch, or a pattern (``transformers.models.*.modeling_*``;
            ``*`` also matches dots). With a pattern, each patch applies to every matching module that has
            its target. Targets may be patterns too (``*RMSNorm.forward``).
        target_file: patchgen's output file. Only the ending ``_gpu.py`` or ``_npu.py`` is used here, and
            only if ``device`` is not given.
        device: ``"gpu"`` or ``"npu"`` if the config is for one of them; None means any.
        base: the config that this one extends. If both patch the same target, this one wins.
        lenient: whether the config was made for patchgen, which accepts some mistakes in silence: they are
            remarks instead of errors (`Plan.tolerate`), and relative imports in its code are relative to
            `generated_package`.
    """

    source_module: str
    target_file: str = "patched_modeling.py"
    description: str = ""
    patches: list[Patch] = field(default_factory=list)
    additional_imports: list[ImportSpec] = field(default_factory=list)
    post_import_blocks: list[str] = field(default_factory=list)
    helpers: list[object] = field(default_factory=list)
    positioned_helpers: list[PositionedHelper] = field(default_factory=list)
    drop_imported_names: set[str] = field(default_factory=set)
    exclude: list[str] = field(default_factory=list)
    transformers_version: str | None = None
    device: Literal["gpu", "npu"] | None = field(default=None, kw_only=True)
    base: PatchConfig | None = field(default=None, kw_only=True)
    slots: list[SlotSpec] = field(default_factory=list, kw_only=True)
    origin: str = field(default="", kw_only=True)
    label: str = field(default="", kw_only=True)
    lenient: bool = field(default=False, kw_only=True, repr=False)
    adopted_from: object = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        # The caller of __init__ (2 frames up: dataclass's __init__, then the config file).
        frame = sys._getframe(2)
        self._namespace: Mapping[str, object] = frame.f_globals
        self.origin = self.origin or f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self._made_at = self.origin
        #: Where names and blocks are declared: they are plain strings and cannot carry their own place.
        self._places: dict[str, str] = {}
        self.device = self.device or device_of(self.target_file)

    @property
    def name(self) -> str:
        """``module:variable`` for messages, headers and reports; the same in every process."""
        if self.label:
            return self.label
        module = self._namespace.get("__name__", "config")
        named = (key for key, value in list(self._namespace.items()) if value is self)
        return f"{module}:{next(named, 'config')}"

    @property
    def generated_package(self) -> str:
        """The package for which patchgen generates modules: ``generated`` beside the config's own module."""
        package = self.name.partition(":")[0].rpartition(".")[0]
        return f"{package}.generated" if package else "generated"

    @property
    def is_pattern(self) -> bool:
        """Whether `source_module` is a pattern."""
        return is_pattern(self.source_module)

    def applies_to(self, module: str) -> bool:
        """Whether the config is for the module with this name."""
        if not self.is_pattern:
            return module == self.source_module
        return fnmatchcase(module, self.source_module)

    # Replacing and adding

    def replace_class(
        self,
        target_class: str,
        replacement: type | None = None,
        name_map: NameMap | None = None,
        description: str | None = None,
        *,
        allow_signature_change: bool = False,
    ) -> Any:
        """Replace ``target_class`` with a class; only the new class's decorators apply."""
        options = dict(name_map=name_map, allow_signature_change=allow_signature_change)
        return self._register(PatchType.CLASS_REPLACEMENT, target_class, replacement, description, **options)

    def replace_function(
        self,
        target_func: str,
        replacement: Callable[..., object] | None = None,
        name_map: NameMap | None = None,
        description: str | None = None,
        *,
        allow_signature_change: bool = False,
    ) -> Any:
        """Replace a module-level or nested function; upstream's decorators stay."""
        options = dict(name_map=name_map, allow_signature_change=allow_signature_change)
        kind = PatchType.FUNCTION_REPLACEMENT
        return self._register(kind, target_func, replacement, description, **options)

    def override_method(
        self,
        target_method: str,
        replacement: object = None,
        name_map: NameMap | None = None,
        description: str | None = None,
        *,
        allow_signature_change: bool = False,
    ) -> Any:
        """Replace ``Class.method``, which must exist; upstream's decorators stay."""
        options = dict(name_map=name_map, allow_signature_change=allow_signature_change)
        return self._register(PatchType.METHOD_OVERRIDE, target_method, replacement, description, **options)

    def add_method(
        self,
        target_method: str,
        replacement: object = None,
        name_map: NameMap | None = None,
        description: str | None = None,
    ) -> Any:
        """Add ``Class.method``, which must not exist yet."""
        return self._register(
            PatchType.METHOD_ADDITION, target_method, replacement, description, name_map=name_map
        )

    def modify_init(
        self,
        target_class: str,
        replacement: Callable[..., object] | None = None,
        description: str | None = None,
    ) -> Any:
        """Run ``function(original_init, self, *args, **kwargs)`` as the class's ``__init__``."""
        return self._register(PatchType.INIT_MODIFICATION, target_class, replacement, description)

    def map_class(
        self,
        target_class: str | re.Pattern[str],
        replacement: str | type | None = None,
        *,
        weights: str = "",
        description: str | None = None,
        overwrite: bool = False,
    ) -> Any:
        """Construct ``replacement`` wherever the module constructs ``target_class`` by name.

        The class itself stays, so the replacement may subclass it. It is imported when a model is built.

        Args:
            target_class: the class; a compiled regular expression means each class in whose name it is
                found. A name has precedence over expressions and patterns, an earlier one of these over a
                later one.
            replacement: ``package.module:Name``, or a class that can be imported under its name.
            weights: ``package.module:name`` of transformers' conversions (``WeightConverter``,
                ``WeightRenaming``) from upstream's checkpoints, a list or a function that makes one.
            overwrite: whether this takes the place of the mapping that the config has for the target.

        Raises:
            ConfigError: a name does not have this form, the class is local to a function or no class of
                modules, or the config maps the target already.
        """
        return mapping(self, target_class, replacement, weights, description, overwrite=overwrite)

    @property
    def mapped_classes(self) -> dict[str, str]:
        """What `map_class` has declared: each target, and ``package.module:Name`` of its replacement."""
        mappings = (patch for patch in self.patches if patch.patch_type is PatchType.CLASS_MAPPING)
        return {
            patch.target: f"{patch.source_module}:{(patch.replacement_source or '').rpartition('.')[2]}"
            for patch in mappings
        }

    def unmap_class(self, target_class: str | re.Pattern[str] | None = None) -> None:
        """Take back a `map_class` (None: all), also in loaded patched modules; existing models do not change.

        Raises:
            ConfigError: the config has no mapping that is declared like this.
        """
        unmapping(self, target_class)

    def adopt_init_modifications(self, other: PatchConfig) -> None:
        """Take over every ``modify_init`` of ``other``."""
        # By value: a patch of patchgen's own Patch class carries patchgen's own enum.
        kind = PatchType.INIT_MODIFICATION.value
        self.patches += [patch for patch in other.patches if patch.patch_type.value == kind]

    def insert_guard(
        self,
        target: str,
        replacement: Callable[..., object] | None = None,
        *,
        fingerprints: Collection[str],
        before: str | None = None,
        relies_on: Mapping[str, Collection[str]] | None = None,
        description: str | None = None,
    ) -> Any:
        """Insert a function's body at the start of the target, or before the statements ``before``.

        The function's parameters must be parameters of the target or captures of ``before``.
        ``fingerprints`` are digests of the upstream bodies that the guard was written for; ``relies_on`` has
        the digests of other definitions in the module.
        """
        return self._register(
            PatchType.GUARD,
            target,
            replacement,
            description,
            before=before,
            **digests(fingerprints, relies_on),
        )

    def rewrite(
        self,
        target: str,
        *,
        pattern: str,
        replacement: str,
        matches: int | None = 1,
        fingerprints: Collection[str] = (),
        relies_on: Mapping[str, Collection[str]] | None = None,
        description: str | None = None,
    ) -> None:
        """Rewrite code in the target by structure: ``pattern`` and ``replacement`` share captures.

        ``matches`` is how often the pattern must match. None accepts any number of matches; zero matches are
        accepted only in a config for a pattern of modules.
        """
        self.patches.append(
            Patch(
                PatchType.REWRITE,
                target,
                None,
                description=description or f"Rewrite {target}",
                pattern=pattern,
                replacement_text=replacement,
                matches=matches,
                origin=place_of_caller(),
                **digests(fingerprints, relies_on),
            )
        )

    def add_patch(self, patch: Patch) -> Patch:
        """Add an existing patch, for example from `create_patch_from_external`."""
        self.patches.append(patch)
        return patch

    # Imports, blocks, helpers, slots

    def add_import(
        self,
        module: str,
        names: list[str] | None = None,
        alias: str | None = None,
        is_from_import: bool = True,  # noqa: FBT001, FBT002 - patchgen's signature
    ) -> None:
        """Add an import; an entry of ``names`` may be ``"x as y"``; without names it is ``import *``."""
        spec = ImportSpec(module, names, alias, is_from_import, origin=place_of_caller())
        self.additional_imports.append(spec)

    def drop_import_names(self, *names: str) -> None:
        """Remove names from upstream's import statements; patches must provide those still in use."""
        self.drop_imported_names.update(names)
        self._places.update(dict.fromkeys(names, place_of_caller()))

    def add_post_import_block(self, block: str) -> None:
        """Add code after the imports."""
        self.post_import_blocks.append(block)
        self._places[block] = place_of_caller()

    def add_helper(self, func: T | None = None) -> Any:
        """Add a function or class after the imports."""
        if func is None:
            return self.add_helper
        self.helpers.append(func)
        return func

    def add_helper_after(self, target: str, helper: T | None = None) -> Any:
        """Add a function or class right after the top-level definition ``target``."""

        def register(added: T) -> T:
            self.positioned_helpers.append(PositionedHelper(target, added))
            return added

        return register if helper is None else register(helper)

    def add_slot(self, name: str, *, op: str, variant: str, parameters: str = "") -> Any:
        """Give the patched module a kernel slot ``name``; guard functions use the result to refer to it.

        ``parameters`` is for slots that replace calls of an upstream function: its parameters as source text.
        """
        spec = SlotSpec(name, op, variant, parameters)
        self.slots.append(spec)
        return SlotHandle(spec)

    def exclude_from_output(self, *names: str) -> None:
        """Omit top-level classes, functions and assignments from the patched module."""
        self.exclude += names
        self._places.update(dict.fromkeys(names, place_of_caller()))

    def inherit(
        self,
        other: PatchConfig,
        *,
        helpers: bool = True,
        imports: bool = True,
        blocks: bool = True,
        drops: bool = True,
        init_modifications: bool = False,
    ) -> None:
        """Copy helpers, imports, blocks and dropped names of ``other`` (ours or patchgen's), not patches."""
        self._places = {**getattr(other, "_places", {}), **self._places}
        if helpers:
            self.helpers += other.helpers
            self.positioned_helpers += other.positioned_helpers
            self.slots += getattr(other, "slots", [])
        if imports:
            self.additional_imports += other.additional_imports
        if blocks:
            self.post_import_blocks += other.post_import_blocks
        if drops:
            self.drop_imported_names |= other.drop_imported_names
        if init_modifications:
            self.adopt_init_modifications(other)

    # Reading

    def place_of(self, declared: object) -> str:
        """Return ``file:line`` of what the config declares (a patch, import, helper, block or name).

        If the object has no place of its own (a patchgen patch), return that of its function, decorators
        included; if that is unknown, that of the config.
        """
        if isinstance(declared, str):
            return self._places.get(declared, self._made_at)
        definition = getattr(declared, "replacement", None) or getattr(declared, "helper", declared)
        return getattr(declared, "origin", "") or place_of_code(definition) or self._made_at

    @property
    def announced(self) -> str:
        """Text for messages about the distribution that provides the config; empty if none does."""
        return self.origin.removeprefix(self._made_at) if self.origin.startswith(self._made_at) else ""

    def get_patches_for_target(self, target: str) -> list[Patch]:
        """Every patch on ``target`` or on something in it."""
        return [patch for patch in self.patches if f"{patch.target}.".startswith(f"{target}.")]

    def get_class_replacements(self) -> dict[str, Patch]:
        """Class replacements by class."""
        return self._of_type(PatchType.CLASS_REPLACEMENT)

    def get_method_overrides(self) -> dict[str, Patch]:
        """Method overrides by ``Class.method``."""
        return self._of_type(PatchType.METHOD_OVERRIDE)

    def get_function_replacements(self) -> dict[str, Patch]:
        """Function replacements by function."""
        return self._of_type(PatchType.FUNCTION_REPLACEMENT)

    def get_init_modifications(self) -> dict[str, Patch]:
        """``__init__`` modifications by class."""
        return self._of_type(PatchType.INIT_MODIFICATION)

    def _of_type(self, patch_type: PatchType) -> dict[str, Patch]:
        return {patch.target: patch for patch in self.patches if patch.patch_type.value == patch_type.value}

    def _register(
        self,
        patch_type: PatchType,
        target: str,
        replacement: T | None,
        description: str | None,
        **options: Any,
    ) -> Any:
        origin = place_of_caller()  # now: the decorator's own line, not that of the decorated object

        def register(decorated: T) -> T:
            self.patches.append(
                Patch(
                    patch_type,
                    target,
                    decorated,
                    origin=origin,
                    source_module=getattr(decorated, "__module__", None),
                    description=description or describe(patch_type, target, decorated),
                    **options,
                )
            )
            return decorated

        return register if replacement is None else register(replacement)

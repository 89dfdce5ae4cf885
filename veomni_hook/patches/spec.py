"""The patch language: what a config declares, as plain data.

Light to import and without any engine code. Names, order and defaults of the fields that VeOmni's patchgen
has are the same here; what it has not is keyword-only or comes after. Every verb works as a decorator and,
with its ``replacement``, as a direct call. Nothing is checked against upstream here: the engine does that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from veomni_hook.patches.records import (
    ImportSpec,
    NameMap,
    Patch,
    PatchType,
    PositionedHelper,
    SlotHandle,
    SlotSpec,
    create_patch_from_external,
    place_of_caller,
)

__all__ = [
    "ImportSpec",
    "Patch",
    "PatchConfig",
    "PatchType",
    "PositionedHelper",
    "SlotHandle",
    "SlotSpec",
    "create_patch_from_external",
    "is_pattern",
]

T = TypeVar("T")


@dataclass(eq=False)
class PatchConfig:
    """The patches of one module.

    Args:
        source_module: dotted name of the module to patch, or a pattern (``transformers.models.*.modeling_*``;
            ``*`` matches dots too) for every module that it matches. The patches of a pattern apply where
            their targets are, which may be patterns as well (``*RMSNorm.forward``).
        target_file: patchgen's output file; only its ending ``_gpu.py`` or ``_npu.py`` means something here,
            and only if ``device`` is not given.
        device: ``"gpu"`` or ``"npu"`` if the config is for one of them; None means any.
        base: the config that this one builds on: where both patch one target, this one wins.
    """

    source_module: str
    target_file: str = "patched_modeling.py"
    description: str = ""
    patches: list[Patch] = field(default_factory=list)
    additional_imports: list[ImportSpec] = field(default_factory=list)
    post_import_blocks: list[str] = field(default_factory=list)
    helpers: list[Any] = field(default_factory=list)
    positioned_helpers: list[PositionedHelper] = field(default_factory=list)
    drop_imported_names: set[str] = field(default_factory=set)
    exclude: list[str] = field(default_factory=list)
    transformers_version: str | None = None
    device: Literal["gpu", "npu"] | None = field(default=None, kw_only=True)
    base: PatchConfig | None = field(default=None, kw_only=True)
    slots: list[SlotSpec] = field(default_factory=list, kw_only=True)
    origin: str = field(default="", kw_only=True)
    label: str = field(default="", kw_only=True)
    adopted_from: Any = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        # The caller of __init__ (2 frames up: dataclass's __init__, then the config file).
        frame = sys._getframe(2)
        self._namespace: Mapping[str, Any] = frame.f_globals
        self.origin = self.origin or f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self._made_at = self.origin
        #: Where names and blocks are declared, which are plain strings.
        self._places: dict[str, str] = {}
        if self.device is None and self.target_file.endswith(("_gpu.py", "_npu.py")):
            self.device = "npu" if self.target_file.endswith("_npu.py") else "gpu"

    @property
    def name(self) -> str:
        """``module:variable`` for messages, headers and reports; the same in every process."""
        if self.label:
            return self.label
        module = self._namespace.get("__name__", "config")
        named = (key for key, value in list(self._namespace.items()) if value is self)
        return f"{module}:{next(named, 'config')}"

    @property
    def is_pattern(self) -> bool:
        """Whether `source_module` is a pattern."""
        return is_pattern(self.source_module)

    def applies_to(self, module: str) -> bool:
        """Whether the config is for the module of this name."""
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
        """Put a class in the place of ``target_class``; it brings its own decorators only."""
        return self._register(
            PatchType.CLASS_REPLACEMENT,
            target_class,
            replacement,
            description,
            name_map=name_map,
            allow_signature_change=allow_signature_change,
        )

    def replace_function(
        self,
        target_func: str,
        replacement: Callable[..., Any] | None = None,
        name_map: NameMap | None = None,
        description: str | None = None,
        *,
        allow_signature_change: bool = False,
    ) -> Any:
        """Put a function in the place of a module-level or nested one; upstream's decorators stay."""
        return self._register(
            PatchType.FUNCTION_REPLACEMENT,
            target_func,
            replacement,
            description,
            name_map=name_map,
            allow_signature_change=allow_signature_change,
        )

    def override_method(
        self,
        target_method: str,
        replacement: Any = None,
        name_map: NameMap | None = None,
        description: str | None = None,
        *,
        allow_signature_change: bool = False,
    ) -> Any:
        """Put a function in the place of ``Class.method``, which must exist; upstream's decorators stay."""
        return self._register(
            PatchType.METHOD_OVERRIDE,
            target_method,
            replacement,
            description,
            name_map=name_map,
            allow_signature_change=allow_signature_change,
        )

    def add_method(
        self,
        target_method: str,
        replacement: Any = None,
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
        replacement: Callable[..., Any] | None = None,
        description: str | None = None,
    ) -> Any:
        """Run ``function(original_init, self, *args, **kwargs)`` as the class's ``__init__``."""
        return self._register(PatchType.INIT_MODIFICATION, target_class, replacement, description)

    def adopt_init_modifications(self, other: PatchConfig) -> None:
        """Take over every ``modify_init`` of ``other``."""
        # By value: a patch of patchgen's own Patch class carries patchgen's own enum.
        kind = PatchType.INIT_MODIFICATION.value
        self.patches += [patch for patch in other.patches if patch.patch_type.value == kind]

    def insert_guard(
        self,
        target: str,
        replacement: Callable[..., Any] | None = None,
        *,
        fingerprints: Collection[str],
        before: str | None = None,
        relies_on: Mapping[str, Collection[str]] | None = None,
        description: str | None = None,
    ) -> Any:
        """Insert a function's body at the start of the target's, or before the statements ``before``.

        Its parameters are parameters of the target or captures of ``before``. ``fingerprints`` are the
        digests of the upstream bodies that the guard was written for, ``relies_on`` those of other
        definitions in the module.
        """
        return self._register(
            PatchType.GUARD,
            target,
            replacement,
            description,
            before=before,
            fingerprints=_collected(fingerprints),
            relies_on=_frozen(relies_on),
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

        ``matches`` is how often the pattern has to match; None takes as many matches as there are, and in a
        config for a pattern of modules also none.
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
                fingerprints=_collected(fingerprints),
                relies_on=_frozen(relies_on),
                origin=place_of_caller(),
            )
        )

    def add_patch(self, patch: Patch) -> Patch:
        """Add a patch that was made elsewhere, as by `create_patch_from_external`."""
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
        """Add an import; an entry of ``names`` may be ``"x as y"``, and no names mean ``import *``."""
        spec = ImportSpec(module, names, alias, is_from_import, origin=place_of_caller())
        self.additional_imports.append(spec)

    def drop_import_names(self, *names: str) -> None:
        """Take names out of upstream's import statements; the patches have to provide those still used."""
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
        """Give the patched module a kernel slot ``name``; the result stands for it in guard functions.

        ``parameters`` is for slots that answer an upstream function's calls: its parameters, in source form.
        """
        spec = SlotSpec(name, op, variant, parameters)
        self.slots.append(spec)
        return SlotHandle(spec)

    def exclude_from_output(self, *names: str) -> None:
        """Leave top-level classes, functions and assignments out of the patched module."""
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
        """Take over what ``other`` (one of ours or patchgen's) puts around its patches, not the patches."""
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

        What says nothing of its place (a patch of patchgen's) has that of its function, decorators included,
        and what has none the config's own.
        """
        if isinstance(declared, str):
            return self._places.get(declared, self._made_at)
        held = getattr(declared, "replacement", None) or getattr(declared, "helper", declared)
        return getattr(declared, "origin", "") or _place_of_code(held) or self._made_at

    @property
    def announced(self) -> str:
        """What messages add of the distribution that brings the config; empty where none does."""
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
        origin = place_of_caller()  # now: a decorator's own line, and not that of what it decorates

        def register(given: T) -> T:
            self.patches.append(
                Patch(
                    patch_type,
                    target,
                    given,
                    origin=origin,
                    source_module=getattr(given, "__module__", None),
                    description=description or _describe(patch_type, target, given),
                    **options,
                )
            )
            return given

        return register if replacement is None else register(replacement)


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


def _describe(patch_type: PatchType, target: str, replacement: object) -> str:
    return _DESCRIPTIONS[patch_type].format(
        target=target, name=getattr(replacement, "__name__", "a replacement")
    )


def _place_of_code(found: object) -> str:
    """Where a function or class is defined, as far as the object itself tells (classes: Python 3.13)."""
    found = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
    code = getattr(found, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    line = getattr(found, "__firstlineno__", None)
    file = getattr(sys.modules.get(getattr(found, "__module__", "")), "__file__", None)
    return f"{file}:{line}" if line and file else ""


def _collected(digests: Collection[str]) -> tuple[str, ...]:
    return (digests,) if isinstance(digests, str) else tuple(digests)


def _frozen(relies_on: Mapping[str, Collection[str]] | None) -> dict[str, tuple[str, ...]]:
    return {name: _collected(digests) for name, digests in (relies_on or {}).items()}

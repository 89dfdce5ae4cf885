"""Configs for patterns of modules: which of their patches apply to one module, and to which definitions.

Such a patch applies to every definition that matches its target (which may be a pattern too) and whose code
it was written for. If a module has none, the patch does not apply there, and that is not an error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from veomni_hook.patches.adopt import adopt_patch
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Definition, Document, FunctionNode, plain
from veomni_hook.patches.code.pattern import Pattern
from veomni_hook.patches.code.tree import module_statements
from veomni_hook.patches.report import PatchReport
from veomni_hook.patches.spec import Patch, PatchConfig, PatchType
from veomni_hook.patches.verbs.class_mapping import constructor_calls
from veomni_hook.patches.verbs.removals import importable
from veomni_hook.patches.verbs.targets import members, top_level

__all__ = ["is_present", "selected", "unapplied"]

_FUNCTIONS = ("function", "method")
_KINDS = {
    PatchType.CLASS_REPLACEMENT: ("class",),
    PatchType.INIT_MODIFICATION: ("class",),
    PatchType.FUNCTION_REPLACEMENT: ("function",),
    PatchType.METHOD_OVERRIDE: ("method",),
    PatchType.GUARD: _FUNCTIONS,
    PatchType.REWRITE: _FUNCTIONS,
    PatchType.CLASS_MAPPING: ("class",),
}


def selected(config: PatchConfig, document: Document) -> Iterator[tuple[Patch, str]]:
    """Yield the patches of a config that apply to a module, each with the target that the config declares.

    All patches of a config for one module must apply. A patch of a config for a pattern is yielded once for
    every definition that it applies to, with that definition as its target.

    Raises:
        ConfigError: a patch has an unknown type.
        PatchError: a code pattern is invalid.
    """
    for declared in config.patches:
        patch = declared if isinstance(declared, Patch) else adopt_patch(declared, config.name)
        if not config.is_pattern and not patch.regex:
            yield patch, patch.target
            continue
        where = f"{document.module}; declared in {config.place_of(patch)} ({config.name})"
        targets = list(_targets(patch, document, where))
        if not targets and not config.is_pattern:
            yield patch, patch.target  # an expression that no class matches: planning it is an error
        for target in targets:
            yield replace(patch, target=target), patch.target


def is_present(config: PatchConfig, document: Document, kind: str, name: str) -> bool:
    """Whether an ``exclude``, ``drop_import`` or ``helper`` of a config for this name concerns the module.

    Always true for a config for one module; there the verb checks whether the name exists.
    """
    if not config.is_pattern:
        return True
    if kind == "drop_import":
        return any(name in importable(statement) for statement in module_statements(document.tree))
    return bool(top_level(document, name))


def unapplied(config: PatchConfig, reports: Iterable[PatchReport]) -> list[Patch]:
    """Return the patches of a config for a pattern that took effect in none of the reported modules."""
    done: set[tuple[str, str]] = set()
    for report in reports:
        done |= {(p.declared or p.target, p.reason) for p in report.applied if p.config == config.name}
        gave_way = {p.target for p in report.yielded if p.config == config.name}
        for patch in config.patches:
            if any(map(patch.is_for, gave_way)):
                done.add((patch.target, patch.description or ""))
    return [patch for patch in config.patches if (patch.target, patch.description or "") not in done]


def _targets(patch: Patch, document: Document, where: str) -> Iterator[str]:
    if patch.patch_type is PatchType.METHOD_ADDITION:
        yield from _owners(patch.target, document)
        return
    kinds = _KINDS.get(patch.patch_type, ())
    matching = [
        definition
        for definition in document.definitions()
        if definition.kind in kinds and patch.is_for(plain(definition.qualname))
    ]
    if matching and all(
        found and all(fingerprint(definition.node) in digests for definition in found)
        for found, digests in ((document.find(name), digests) for name, digests in patch.relies_on.items())
    ):
        fitting = (d.qualname for d in matching if _fits(d, patch, document, where))
        yield from dict.fromkeys(fitting)


def _owners(target: str, document: Document) -> Iterator[str]:
    """Targets of an added method: the classes that lack it."""
    owner, _, method = plain(target).rpartition(".")
    for definition in document.definitions():
        node = definition.node
        if isinstance(node, ast.ClassDef) and fnmatchcase(plain(definition.qualname), owner):
            if method not in members(node):
                yield f"{definition.qualname}.{method}"


def _fits(definition: Definition, patch: Patch, document: Document, where: str) -> bool:
    """Whether the patch was written for this definition's code."""
    if patch.fingerprints and fingerprint(definition.node) not in patch.fingerprints:
        return False
    if patch.patch_type is PatchType.CLASS_MAPPING:
        return bool(constructor_calls(document, definition.qualname))
    if not isinstance(definition.node, FunctionNode):
        return True
    if patch.before is not None:
        pattern = Pattern(patch.before, where=where, target=patch.target)
        return bool(pattern.find_statements(definition.node, nested=False))
    if patch.pattern is not None and patch.matches is None:
        pattern = Pattern(patch.pattern, where=where, target=patch.target)
        return bool(pattern.find(definition.node))
    return True

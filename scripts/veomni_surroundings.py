"""What a config changes beside its patches: definitions left out, imports dropped, helpers added.

Imports and slots that a config adds are not listed: patches use them, and change nothing without them.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from veomni_hook.patches.spec import Patch, PatchConfig, PatchType
from veomni_hook.tools.migration import vocabulary as words
from veomni_hook.tools.migration.alone import helper_name
from veomni_hook.tools.migration.concerns import Concern, concerns
from veomni_hook.tools.migration.usage import Given, definition, given, identifiers, replacement, used

__all__ = ["Surrounding", "surroundings"]

#: By target: what a patch is for, and the names that its replacement uses.
_Purposes: TypeAlias = Mapping[str, tuple[Concern, ...]]
_Uses: TypeAlias = Mapping[str, Set[str]]


@dataclass(frozen=True)
class Surrounding:
    """A change that a config makes beside its patches.

    Attributes:
        kind: ``excluded``, ``dropped import`` or ``helper``.
        names: what is excluded, dropped or added.
        concerns: what for.
        targets: the targets of the patches that it belongs to; none for exclusions.
    """

    kind: str
    names: tuple[str, ...]
    concerns: tuple[Concern, ...]
    targets: tuple[str, ...] = ()


def surroundings(config: PatchConfig, upstream: str) -> list[Surrounding]:
    """Return what a config changes beside its patches.

    Args:
        config: the config.
        upstream: the source of its module, in the release that it was written for.

    Raises:
        ReplacementError: the source of a replacement or a helper cannot be read.
        SyntaxError: ``upstream``, or a block of the config, is not valid Python.
    """
    purposes = {patch.target: concerns(patch, config, upstream) for patch in config.patches}
    names = given(config)
    uses = {patch.target: _uses(patch, config, names) for patch in config.patches}
    changes = []
    if config.exclude:
        left_out = Concern(words.EXCLUSION, "excluded from the output")
        changes.append(Surrounding("excluded", tuple(config.exclude), (left_out,)))
    changes += [
        _dropped(name, config, upstream, purposes, uses) for name in sorted(config.drop_imported_names)
    ]
    changes += [_helped(name, helper, config, purposes, uses) for name, helper in _helpers(config)]
    return changes


def _dropped(name: str, config: PatchConfig, upstream: str, purposes: _Purposes, uses: _Uses) -> Surrounding:
    """A dropped name is for what the patches are for that had it upstream."""
    for spec in config.additional_imports:
        module = spec.module
        if name in (spec.names or ()) and (known := words.of_module(module, name)):
            purpose = Concern(known, f"{name} of {module}")
            return Surrounding("dropped import", (name,), (purpose,), _mentioning(name, uses))
    bodies = {target: tree for target in purposes if (tree := definition(upstream, target)) is not None}
    users = _mentioning(name, {target: identifiers(tree) for target, tree in bodies.items()})
    by_name = {one.name: one for target in users for one in purposes[target]}
    wanted = [by_name[kind] for kind in (words.LOG_PROBS, words.KERNEL) if kind in by_name]
    return Surrounding("dropped import", (name,), tuple(wanted[:1]) or (_unknown(users),), users)


def _helped(name: str, helper: object, config: PatchConfig, purposes: _Purposes, uses: _Uses) -> Surrounding:
    """A helper is for what its own code shows, else for what all patches that call it are for."""
    users = _mentioning(name, uses)
    own: tuple[Concern, ...] = ()
    if helper is not None:
        own = concerns(Patch(PatchType.FUNCTION_REPLACEMENT, name, helper), config)
    if not own or own[0].name == words.OTHER:
        kinds = [{one.name for one in purposes[target]} for target in users]
        shared = set.intersection(*kinds) if kinds else set()
        own = tuple(one for one in purposes[users[0]] if one.name in shared) if users else ()
    return Surrounding("helper", (name,), own or (_unknown(users),), users)


def _helpers(config: PatchConfig) -> Iterator[tuple[str, object]]:
    for helper in (*config.helpers, *(positioned.helper for positioned in config.positioned_helpers)):
        yield helper_name(helper), helper
    for block in config.post_import_blocks:
        for node in ast.parse(textwrap.dedent(block)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name, None


def _uses(patch: Patch, config: PatchConfig, names: Given) -> set[str]:
    """The identifiers of a replacement, under the patch's name map, and the helpers that it calls."""
    tree = replacement(patch, config)
    mentioned = identifiers(tree) | set(used(tree, names).helpers)
    for old, new in (patch.name_map or {}).items():
        mentioned |= {name.replace(old, new) for name in mentioned}
    return mentioned


def _mentioning(name: str, uses: _Uses) -> tuple[str, ...]:
    return tuple(target for target, mentioned in uses.items() if name in mentioned)


def _unknown(users: Sequence[str]) -> Concern:
    if not users:
        return Concern(words.NO_CHANGE, "no patch uses it")
    return Concern(words.OTHER, f"used by {', '.join(users[:2])}")

"""What a config changes beside its patches: definitions left out, imports dropped, helpers added.

Imports and slots that a config adds are not listed: patches use them, and change nothing without them.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from veomni_hook.migration import vocabulary as words
from veomni_hook.migration.concerns import Concern, concerns
from veomni_hook.migration.usage import definition, identifiers, replacement
from veomni_hook.patches.spec import Patch, PatchConfig, PatchType

__all__ = ["Surrounding", "surroundings"]


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
    found = []
    if config.exclude:
        left_out = Concern(words.EXCLUSION, "excluded from the output")
        found.append(Surrounding("excluded", tuple(config.exclude), (left_out,)))
    found += [_dropped(name, config, upstream, purposes) for name in sorted(config.drop_imported_names)]
    found += [_helped(name, given, config, purposes) for name, given in _helpers(config)]
    return found


def _dropped(
    name: str, config: PatchConfig, upstream: str, purposes: dict[str, tuple[Concern, ...]]
) -> Surrounding:
    """A dropped name is for what the patches are for that had it upstream."""
    for spec in config.additional_imports:
        module = spec.module
        if name in (spec.names or ()) and (known := words.of_module(module, name)):
            users = _mentioning(name, {patch.target: replacement(patch, config) for patch in config.patches})
            return Surrounding("dropped import", (name,), (Concern(known, f"{name} of {module}"),), users)
    bodies = {target: tree for target in purposes if (tree := definition(upstream, target)) is not None}
    users = _mentioning(name, bodies)
    held = {one.name: one for target in users for one in purposes[target]}
    wanted = [held[kind] for kind in (words.LOG_PROBS, words.KERNEL) if kind in held]
    return Surrounding("dropped import", (name,), tuple(wanted[:1]) or (_unknown(users),), users)


def _helped(
    name: str, given: object, config: PatchConfig, purposes: dict[str, tuple[Concern, ...]]
) -> Surrounding:
    """A helper is for what its own code shows, else for what all patches that call it are for."""
    users = _mentioning(name, {patch.target: replacement(patch, config) for patch in config.patches})
    own: tuple[Concern, ...] = ()
    if given is not None:
        own = concerns(Patch(PatchType.FUNCTION_REPLACEMENT, name, given), config)
    if not own or own[0].name == words.OTHER:
        kinds = [{one.name for one in purposes[target]} for target in users]
        shared = set.intersection(*kinds) if kinds else set()
        text = f"called by {', '.join(users[:2])}"
        own = tuple(Concern(kind, text) for kind in words.MEANINGS if kind in shared)
    return Surrounding("helper", (name,), own or (_unknown(users),), users)


def _helpers(config: PatchConfig) -> Iterator[tuple[str, object]]:
    for helper in (*config.helpers, *(positioned.helper for positioned in config.positioned_helpers)):
        yield getattr(helper, "__name__", repr(helper)), helper
    for block in config.post_import_blocks:
        for node in ast.parse(textwrap.dedent(block)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name, None


def _mentioning(name: str, trees: dict[str, ast.Module]) -> tuple[str, ...]:
    return tuple(target for target, tree in trees.items() if name in identifiers(tree))


def _unknown(users: Sequence[str]) -> Concern:
    return Concern(words.OTHER, f"used by {', '.join(users[:2])}" if users else "no patch uses it")

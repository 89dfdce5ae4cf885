"""What some patches of a config need of its imports, blocks, helpers, dropped imports and exclusions."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.imports import absolute_name
from veomni_hook.patches.code.scope import global_bindings, global_uses, own_names
from veomni_hook.patches.code.snippet import read_snippet
from veomni_hook.patches.code.tree import module_statements
from veomni_hook.patches.records import NameMap
from veomni_hook.patches.spec import ImportSpec, Patch, PatchConfig, PositionedHelper
from veomni_hook.patches.verbs.targets import top_level
from veomni_hook.tools.migration.alone import helper_name, imported_names
from veomni_hook.tools.migration.together import unfit

__all__ = ["Needs", "needs"]


@dataclass
class Needs:
    """The parts of a config that some of its patches need, in the order of the config."""

    imports: list[ImportSpec] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    helpers: list[object] = field(default_factory=list)
    placed: list[PositionedHelper] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Provider:
    """One thing in a config that gives names to the patched module; ``tree`` is what it uses itself."""

    names: set[str]
    tree: ast.Module | None
    kind: str
    index: int
    part: int = 0


def needs(config: PatchConfig, patches: Sequence[Patch], document: Document) -> Needs:
    """Return what patches need, directly or through helpers, and what gives upstream's names another meaning.

    Args:
        config: the config.
        patches: some of its patches.
        document: the module's source.

    Raises:
        ReplacementError: the source of a patch or a helper cannot be read.
        SyntaxError: a block of the config is not valid Python.
    """
    providers = list(_providers(config, document))
    known = {name for one in providers for name in one.names}
    origins = _origins(document)
    kept = [one for one in providers if "*" in one.names or _overrides(one, config, origins)]
    pending = [_tree(config, patch.replacement, patch.name_map) for patch in patches if patch.replacement]
    pending += [one.tree for one in kept if one.tree is not None]
    while pending:
        wanted = {use.name for use in global_uses(pending.pop(), known)}
        for one in providers:
            if one.names & wanted and one not in kept:
                kept.append(one)
                if one.tree is not None:
                    pending.append(one.tree)
    collected = _collected(config, [one for one in providers if one in kept], document)
    collected.excluded = unfit(config, patches, document)
    return collected


def _providers(config: PatchConfig, document: Document) -> Iterator[_Provider]:
    for index, spec in enumerate(config.additional_imports):
        if not spec.is_from_import:
            yield _Provider({spec.alias or spec.module.partition(".")[0]}, None, "import", index)
        for part, name in enumerate(spec.names or ("*",) if spec.is_from_import else ()):
            yield _Provider({name.rpartition(" as ")[2].strip()}, None, "import", index, part)
    for index, block in enumerate(config.post_import_blocks):
        for part, node in enumerate(ast.parse(textwrap.dedent(block)).body):
            yield _Provider(own_names([node]), ast.Module([node], []), "block", index, part)
    for index, helper in enumerate(config.helpers):
        yield _Provider({helper_name(helper)}, _tree(config, helper), "helper", index)
    for index, placed in enumerate(config.positioned_helpers):
        if top_level(document, placed.target):
            yield _Provider({helper_name(placed.helper)}, _tree(config, placed.helper), "placed", index)


def _tree(config: PatchConfig, definition: object, name_map: NameMap | None = None) -> ast.Module:
    snippet = read_snippet(definition, where=f"config {config.name}", name_map=name_map)
    return ast.Module([snippet.node], [])


def _overrides(one: _Provider, config: PatchConfig, origins: dict[str, str]) -> bool:
    """Whether it binds a name of upstream anew, which changes code that no patch names."""
    shared = one.names & set(origins)
    if not shared or one.kind != "import":
        return bool(shared)
    return any(origins[name] != config.additional_imports[one.index].module for name in shared)


def _origins(document: Document) -> dict[str, str]:
    """The names that upstream binds, with the module that it imports them from (empty: it defines them)."""
    origins = dict.fromkeys(global_bindings(document.tree), "")
    for node in module_statements(document.tree):
        if isinstance(node, ast.ImportFrom):
            module = absolute_name("." * node.level + (node.module or ""), document.module)
            origins.update({alias.asname or alias.name: module for alias in node.names})
    return origins


def _collected(config: PatchConfig, kept: Sequence[_Provider], document: Document) -> Needs:
    collected = Needs()
    for index, spec in enumerate(config.additional_imports):
        parts = [one.part for one in kept if one.kind == "import" and one.index == index]
        if parts and spec.is_from_import and spec.names:
            collected.imports.append(replace(spec, names=[spec.names[part] for part in parts]))
        elif parts:
            collected.imports.append(spec)
    for index, block in enumerate(config.post_import_blocks):
        parts = [one.part for one in kept if one.kind == "block" and one.index == index]
        if parts:
            collected.blocks.append(_statements(textwrap.dedent(block), parts))
    collected.helpers = [config.helpers[one.index] for one in kept if one.kind == "helper"]
    collected.placed = [config.positioned_helpers[one.index] for one in kept if one.kind == "placed"]
    bound = {name for one in kept for name in one.names}
    collected.drops = sorted(config.drop_imported_names & bound & imported_names(document))
    return collected


def _statements(block: str, parts: Sequence[int]) -> str:
    """Some statements of a block, as they are written."""
    lines = block.split("\n")
    body = ast.parse(block).body
    kept = []
    for part in parts:
        node = body[part]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        kept += lines[first - 1 : node.end_lineno]
    return "\n".join(kept)

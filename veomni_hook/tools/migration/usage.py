"""What a patch's replacement uses, read from its syntax tree: slots, imported names, identifiers.

A replacement is code for the patched module, so its names are those that the config gives to this module: its
imports, its blocks after the imports, its helpers. What a helper uses counts for the code that calls it.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from veomni_hook.patches.code.document import has_docstring
from veomni_hook.patches.code.scope import global_uses
from veomni_hook.patches.code.snippet import read_snippet
from veomni_hook.patches.code.tree import blocks
from veomni_hook.patches.spec import Patch, PatchConfig
from veomni_hook.tools.migration.vocabulary import CONFIG_SLOT, OP_SLOT

__all__ = ["Given", "Used", "definition", "given", "identifiers", "parameters", "replacement", "used"]


@dataclass(frozen=True)
class Given:
    """The names that a config gives to the patched module.

    ``slots`` are op and variant by name (no variant: a choice of the config), ``origins`` the modules of
    imported names, ``helpers`` the trees of functions and classes that the config adds.
    """

    slots: Mapping[str, tuple[str, str]]
    origins: Mapping[str, str]
    helpers: Mapping[str, ast.Module]


@dataclass
class Used:
    """What a replacement uses of `Given`: slots, and (name, module) of imports."""

    slots: dict[str, tuple[str, str]] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, ast.Module] = field(default_factory=dict)


def given(config: PatchConfig) -> Given:
    """Return the names that the config gives to the patched module."""
    slots = {slot.name: (slot.op, slot.variant) for slot in config.slots}
    origins: dict[str, str] = {}
    helpers: dict[str, ast.Module] = {}
    for spec in config.additional_imports:
        if not spec.is_from_import or spec.names is None:
            origins[spec.alias or spec.module.partition(".")[0]] = spec.module
            continue
        for name in spec.names:
            taken, _, alias = name.partition(" as ")
            origins[alias or taken] = f"{spec.module}:{taken}"
    for block in config.post_import_blocks:
        for node in _code_alone(ast.parse(textwrap.dedent(block))).body:
            if isinstance(node, ast.ImportFrom | ast.Import):
                origins.update(_imported(node))
            elif isinstance(node, ast.Assign) and (slot := _slot(node.value)) is not None:
                slots.update({target.id: slot for target in node.targets if isinstance(target, ast.Name)})
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                helpers[node.name] = ast.Module([node], [])
    for helper in (*config.helpers, *(positioned.helper for positioned in config.positioned_helpers)):
        tree = _tree(helper, where=config.place_of(helper))
        helpers.update({str(getattr(node, "name", "")): tree for node in tree.body})
    return Given(slots, origins, helpers)


def replacement(patch: Patch, config: PatchConfig) -> ast.Module:
    """Return the tree of a patch's replacement without docstrings and annotations.

    It is empty if the replacement is in another package.

    Raises:
        ReplacementError: its source cannot be read.
    """
    if patch.replacement is None:
        return ast.Module([], [])
    # Without the name map: it changes the names of classes, which say nothing about concerns.
    return _tree(patch.replacement, where=config.place_of(patch), target=patch.target)


def definition(source: str | None, target: str) -> ast.Module | None:
    """Return the tree of ``target`` in a module's source, as `replacement` does; None if it is not there."""
    if source is None:
        return None
    scope: ast.AST = _parsed(source)
    first: list[ast.stmt] = []
    for part in target.split("."):
        first = [one for block in blocks(scope) for one in block if getattr(one, "name", "") == part][:1]
        if not first:
            return None
        scope = first[0]
    return ast.Module(first, [])


def used(tree: ast.Module, names: Given, usage: Used | None = None) -> Used:
    """Return what the code and the helpers that it calls use, together with ``usage``."""
    usage = Used() if usage is None else usage
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            usage.imports.update(_imported(node))
    for use in global_uses(tree, [*names.slots, *names.origins, *names.helpers]):
        name = use.name
        if name in names.slots:
            usage.slots[name] = names.slots[name]
        elif name in names.origins:
            usage.imports[name] = names.origins[name]
        elif name not in usage.helpers:
            usage.helpers[name] = names.helpers[name]
            used(names.helpers[name], names, usage)
    return usage


def identifiers(tree: ast.AST) -> set[str]:
    """Every name, attribute, parameter, keyword and string that is an identifier."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            names.add(str(node.arg))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
    return names


def parameters(tree: ast.AST) -> set[str]:
    """The names of all parameters."""
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _imported(node: ast.ImportFrom | ast.Import) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}:{alias.name}"
        else:
            yield alias.asname or alias.name.partition(".")[0], alias.name


def _slot(value: ast.expr) -> tuple[str, str] | None:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return None
    texts = [argument.value for argument in value.args if isinstance(argument, ast.Constant)]
    if value.func.id == OP_SLOT and len(texts) >= 2:
        return str(texts[0]), str(texts[1])
    return (str(texts[0]), "") if value.func.id == CONFIG_SLOT and texts else None


def _tree(held: object, where: str, target: str = "") -> ast.Module:
    return _code_alone(ast.Module([read_snippet(held, where=where, target=target).node], []))


@functools.lru_cache(maxsize=2)
def _parsed(source: str) -> ast.Module:
    return _code_alone(ast.parse(source))


def _code_alone(tree: ast.Module) -> ast.Module:
    """Remove docstrings and annotations, which do nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            node.annotation = ast.copy_location(ast.Constant(None), node.annotation)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and has_docstring(node):
            node.body = node.body[1:] or [ast.copy_location(ast.Pass(), node.body[0])]
    return tree

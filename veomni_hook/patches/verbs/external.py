"""Replacements in another package: check that they exist without importing anything.

Importing would load torch and triton, although the installed source has the answer; star imports are followed
from file to file. Names that only a running module knows (``__getattr__``, extension modules) are looked up
in the module if it is loaded; otherwise the import statement of the patched module checks them.
"""

from __future__ import annotations

import ast
import pkgutil
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

from veomni_hook.errors import ReplacementError
from veomni_hook.locate import locate
from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.scope import global_bindings, has_star_import
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.plan import Task

__all__ = ["external_function", "external_import", "known_names"]


def external_import(task: Task, name: str) -> str | None:
    """Return the statement that binds ``name`` to the external replacement of a patch.

    None if a lenient config names a module that is not installed: upstream's definition stays.

    Raises:
        ReplacementError: the module or the attribute does not exist.
    """
    source = task.patch.replacement_source or ""
    module, _, attribute = source.rpartition(".")
    if not module or not all(part.isidentifier() for part in source.split(".")):
        raise task.error(
            ReplacementError,
            f"{source!r} is no dotted name of an external replacement",
            "name module and attribute, as in create_patch_from_external(target, module, name)",
        )
    loaded = _complete(module)
    known = known_names(module)
    if known == set() and loaded is not None and not hasattr(loaded, attribute):
        known = set(dir(loaded))
    if known is None:
        error = task.error(
            ReplacementError,
            f"the external replacement {source} does not exist: there is no module {module}",
            f"install what provides {module.partition('.')[0]}, or correct the module's name",
        )
        task.tolerate(error, instead=f"upstream's {task.target} stays")
        task.idle = True
        task.plan.wanting.append(module)
        return None
    if known and attribute not in known:
        raise task.error(
            ReplacementError,
            f"the external replacement {source} does not exist: {module} has no {attribute}",
            f"name something that it has; nearest: {listed(nearest(attribute, known))}",
        )
    return f"from {module} import {attribute}" + (f" as {name}" if name != attribute else "")


def external_function(source: str) -> FunctionNode | None:
    """Return the function with a dotted name as its module's file defines it.

    None: the file does not say, also where decorators may give it other parameters.
    """
    module, _, attribute = source.rpartition(".")
    tree = _tree(_find(module))
    for node in reversed(tree.body if tree is not None else ()):
        if isinstance(node, FunctionNode) and node.name == attribute:
            return None if node.decorator_list else node
    return None


def known_names(module: str) -> set[str] | None:
    """Names that can be imported from a module: None if it does not exist, empty if they are unknown."""
    loaded = _complete(module)
    if loaded is not None:
        # A lazy module provides more names than its dict contains.
        return (
            set()
            if hasattr(type(loaded), "__getattr__") or hasattr(loaded, "__getattr__")
            else set(dir(loaded))
        )
    spec = _find(module)
    if spec is None:
        return None
    if (tree := _tree(spec)) is None:
        return set()
    names = set(global_bindings(tree))
    replaces_itself = any(
        isinstance(node, ast.Attribute) and node.attr == "modules" and isinstance(node.value, ast.Name)
        for node in walk_ast(tree)
    )
    if "__getattr__" in names or replaces_itself:
        return set()
    starred = _starred(tree, module, spec)
    if starred is None:
        return set()
    submodules = {info.name for info in pkgutil.iter_modules(spec.submodule_search_locations or [])}
    return (names | starred | submodules) - {"*"}


def _tree(spec: ModuleSpec | None) -> ast.Module | None:
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        return None
    try:
        return ast.parse(spec.loader.get_data(spec.loader.path))
    except (OSError, SyntaxError):
        return None


def _complete(module: str) -> ModuleType | None:
    """The module if it is loaded completely: one that imports the patched module will have more names."""
    loaded = sys.modules.get(module)
    return None if getattr(getattr(loaded, "__spec__", None), "_initializing", False) else loaded


def _starred(tree: ast.Module, module: str, spec: ModuleSpec) -> set[str] | None:
    """Names that star imports provide; None if they are unknown."""
    names: set[str] = set()
    if not has_star_import(tree):
        return names
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    for node in walk_ast(tree):
        if not isinstance(node, ast.ImportFrom) or node.names[0].name != "*":
            continue
        parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*parts, *([node.module] if node.module else [])])
        brought = known_names(source) if source != module else set()
        if not brought:
            return None
        # More than ``*`` brings where __all__ is shorter: a name too many is better than one too few here.
        names |= brought
    return names


def _find(module: str) -> ModuleSpec | None:
    """The module's spec; what imports it is asked first, its parents are found, not imported."""
    return getattr(sys.modules.get(module), "__spec__", None) or locate(module)

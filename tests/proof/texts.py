"""The texts of a module that the proof compares: upstream's, a site's edits of it, the patched one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from veomni_hook.patches.code.document import has_docstring
from veomni_hook.patches.routes.compose import copy_name


def upstream_of(module: Any) -> str:
    """Upstream's text of a patched module."""
    return Path(module.__spec__.loader.upstream).read_text(encoding="utf-8")


def patched(module: Any, target: str) -> ast.AST:
    """The definition that a target names in the text that a module was made of."""
    return definition(ast.parse(Path(module.__file__).read_text(encoding="utf-8")), target)


def definition(tree: ast.Module, target: str) -> ast.AST:
    """The definition that a target names; for a method with a copy, with the code of the copy."""
    tree = with_copies_in_place(tree)
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in target.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = next(s for s in reversed(body) if isinstance(s, kinds) and s.name == part)
        body = found.body
    assert found is not None
    return found


def with_copies_in_place(tree: ast.Module) -> ast.Module:
    """Patched code with the copies of methods, where kernels replace several statements, for the methods."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for owner in tree.body:
        for method in owner.body if isinstance(owner, ast.ClassDef) else ():
            name = copy_name(f"{owner.name}.{getattr(method, 'name', '')}")
            if isinstance(method, ast.FunctionDef) and name in functions:
                docstring = method.body[: int(has_docstring(method))]
                method.body = [*docstring, *functions[name].body]
                tree.body.remove(functions[name])
    return tree

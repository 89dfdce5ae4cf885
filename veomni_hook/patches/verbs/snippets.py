"""The code that a step brings along, as text: snippets, blocks and the modules of imports.

The code of a config made for patchgen is written for the module that patchgen generates: its relative imports
are relative to that module's package, and a ``name_map`` may have entries that match nothing.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from dataclasses import replace
from functools import partial
from typing import Any

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.imports import absolute_imports, absolute_name
from veomni_hook.patches.code.snippet import Snippet, read_snippet
from veomni_hook.patches.plan import Plan
from veomni_hook.patches.spec import PatchType

__all__ = ["block_text", "companions", "imported_module", "snippet_of"]

_INDEPENDENT = sys.stdlib_module_names | {"torch", "transformers", "veomni_hook"}


def snippet_of(plan: Plan, index: int, given: Any, *, name_map: Any = None, accessor: str = "") -> Snippet:
    """Read the source of a function or class that step ``index`` brings along; see `read_snippet`.

    Raises:
        ReplacementError: it has no source, or is no definition.
        NameMapError: an entry of ``name_map`` matches nothing, and the config is not lenient.
    """
    step = plan.steps[index]
    snippet = read_snippet(
        given,
        where=plan.where(index),
        target=step.target,
        name_map=name_map,
        accessor=accessor,
        tolerate=partial(plan.tolerate, index),
    )
    text = _absolute(plan, index, snippet.document)
    if text == snippet.document.source:
        return snippet
    return replace(snippet, document=Document(text, snippet.document.module))


def block_text(plan: Plan, index: int, text: str) -> str:
    """Return the text of an added block as it must stand in the patched module."""
    if not plan.steps[index].lenient:
        return text
    try:
        document = Document(text)
    except SyntaxError:
        return text  # `check_text` reports it, with the patch
    return _absolute(plan, index, document)


def imported_module(plan: Plan, index: int, name: str) -> str:
    """Return the name of the module that an added import names."""
    step = plan.steps[index]
    return absolute_name(name, _generated(plan, index)) if step.lenient else name


def companions(plan: Plan) -> tuple[str, ...]:
    """Return the modules that imports and blocks of lenient configs import in any case, at module level.

    transformers, torch and the standard library are left out: they do not import transformers' models.
    """
    found: dict[str, None] = {}
    for index, step in enumerate(plan.steps):
        if not step.lenient:
            continue
        if step.kind == PatchType.ADDITIONAL_IMPORT.value:
            found[imported_module(plan, index, step.payload.module)] = None
        elif step.kind == "post_import_block":
            text = block_text(plan, index, textwrap.dedent(step.payload))
            for node in Document(text).tree.body:
                if isinstance(node, ast.Import):
                    found.update(dict.fromkeys(alias.name for alias in node.names))
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found[node.module] = None
    return tuple(name for name in found if name.partition(".")[0] not in _INDEPENDENT)


def _absolute(plan: Plan, index: int, document: Document) -> str:
    return (
        absolute_imports(document, _generated(plan, index)) if plan.steps[index].lenient else document.source
    )


def _generated(plan: Plan, index: int) -> str:
    """The name of the module that patchgen would generate; only its package matters."""
    return f"{plan.steps[index].config.generated_package}.modeling"

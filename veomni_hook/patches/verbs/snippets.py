"""The code that a step brings along, as text: snippets, blocks and the modules of imports.

The code of a config made for patchgen is written for the module that patchgen generates: its relative imports
are relative to that module's package, and a ``name_map`` may have entries that match nothing.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from typing import Any

from veomni_hook.patches.adopt import is_patch_config
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.imports import absolute_imports, absolute_name
from veomni_hook.patches.code.snippet import Snippet, read_snippet
from veomni_hook.patches.plan import Plan, Task
from veomni_hook.patches.spec import PatchType
from veomni_hook.patches.verbs.runtime import served

__all__ = ["block_text", "companions", "imported_module", "snippet_of", "with_comments"]

_INDEPENDENT = sys.stdlib_module_names | {"torch", "transformers", "veomni_hook"}


def snippet_of(task: Task, definition: object, *, name_map: Any = None, accessor: str = "") -> Snippet:
    """Read the source of a function or class that a step brings along; see `read_snippet`.

    Raises:
        ReplacementError: it has no source, or is no definition.
        NameMapError: an entry of ``name_map`` matches nothing, and the config is not lenient.
    """
    snippet = read_snippet(
        definition, name_map=name_map, accessor=accessor, tolerate=task.tolerate, **task.place
    )
    snippet = snippet.with_text(_absolute(task, snippet.document))
    return snippet.with_text(served(snippet.document))


def with_comments(snippet: Snippet, text: str) -> str:
    """Text made of a snippet, below the comments that stand above the snippet."""
    return f"{snippet.comments}\n{text}".removeprefix("\n")


def block_text(task: Task, text: str) -> str:
    """Return the text of an added block as it must stand in the patched module."""
    if not task.step.config.lenient:
        return text
    try:
        document = Document(text)
    except SyntaxError:
        return text  # `check_text` reports it, with the patch
    return _absolute(task, document)


def imported_module(task: Task, name: str) -> str:
    """Return the name of the module that an added import names."""
    return absolute_name(name, _generated(task)) if task.step.config.lenient else name


def companions(plan: Plan) -> tuple[str, ...]:
    """Return the modules that the imports and blocks of some configs import in any case, at module level.

    These configs are made for patchgen, or take code from one that is. transformers, torch and the standard
    library are left out: they do not import transformers' models.
    """
    wanting = {id(step.config) for step in plan.steps if step.config.lenient or _from_patchgen(step.payload)}
    modules: dict[str, None] = {}
    for task in plan.tasks:
        step = task.step
        if id(step.config) not in wanting:
            continue
        if step.kind == PatchType.ADDITIONAL_IMPORT:
            modules[imported_module(task, step.payload.module)] = None
        elif step.kind == "post_import_block":
            text = block_text(task, textwrap.dedent(step.payload))
            for node in Document(text).tree.body:
                if isinstance(node, ast.Import):
                    modules.update(dict.fromkeys(alias.name for alias in node.names))
                elif isinstance(node, ast.ImportFrom) and node.module:
                    modules[node.module] = None
    return tuple(name for name in modules if name.partition(".")[0] not in _INDEPENDENT)


def _from_patchgen(payload: object) -> bool:
    """Whether the module of a patch's replacement holds a config made for patchgen."""
    replacement = getattr(payload, "replacement", None)
    home = sys.modules.get(getattr(replacement, "__module__", ""))
    configs = filter(is_patch_config, vars(home).values()) if home is not None else ()
    return any(getattr(config, "lenient", True) for config in configs)


def _absolute(task: Task, document: Document) -> str:
    return absolute_imports(document, _generated(task)) if task.step.config.lenient else document.source


def _generated(task: Task) -> str:
    """The name of the module that patchgen would generate; only its package matters."""
    return f"{task.step.config.generated_package}.modeling"

"""Replace classes and functions: with source from a config, or with an import from elsewhere.

Upstream's decorators of a function stay, above those of the replacement; a class has only the replacement's
decorators.
"""

from __future__ import annotations

import ast

from veomni_hook.errors import ReplacementError
from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.edit import reindent
from veomni_hook.patches.code.snippet import Snippet
from veomni_hook.patches.code.tree import FUNCTIONS
from veomni_hook.patches.plan import Plan, Task
from veomni_hook.patches.spec import PatchType
from veomni_hook.patches.verbs.external import external_function, external_import
from veomni_hook.patches.verbs.signature import check_signature, with_new_names
from veomni_hook.patches.verbs.snippets import snippet_of, with_comments
from veomni_hook.patches.verbs.targets import class_named, function_named

__all__ = ["plan_replacements", "replace_function_text"]

_BINDINGS = frozenset({"staticmethod", "classmethod", "property", "cached_property"})


def plan_replacements(plan: Plan) -> None:
    """Plan every replacement of a class or function.

    Raises:
        PatchTargetError: the target is missing.
        ReplacementError, SignatureError, NameMapError: see `snippet_of` and `check_signature`.
    """
    for task in plan.of_kind(PatchType.CLASS_REPLACEMENT):
        _replace_class(task)
    for task in plan.of_kind(PatchType.FUNCTION_REPLACEMENT):
        hint = "use override_method for a method, or " if "." in task.target else ""
        definition, node = function_named(task, "function", hint=hint)
        replace_function_text(task, node, task.marker("PATCHED FUNCTION", definition.qualname))


def replace_function_text(
    task: Task, node: FunctionNode, marker: str, *, owner: str = "", accessor: str = ""
) -> None:
    """Plan to replace ``node``, in class ``owner`` if any, with the replacement of a step."""
    document, patch = task.document, task.patch
    indent = document.indent(node)
    begin = document.line_start(document.span(node)[0])
    if patch.replacement_source and patch.replacement is None:
        _import_function(task, node, marker)
        external = external_function(patch.replacement_source)
        # Without ``**kwargs``, a name that it does not take is an error when it is called.
        if external is not None and external.args.kwarg and not patch.allow_signature_change:
            check_signature(task, node, external, target=task.target, owner=owner)
        return
    task.mark(begin, f"{indent}{marker}\n")
    snippet = snippet_of(task, patch.replacement, name_map=patch.name_map, accessor=accessor)
    replacement = snippet.node
    if not isinstance(replacement, FUNCTIONS):
        raise _wrong_kind(task, snippet, "function")
    _check_bindings(task, node, replacement)
    snippet = with_new_names(task, snippet, [(node, replacement)])
    if not patch.allow_signature_change and isinstance(snippet.node, FUNCTIONS):
        check_signature(task, node, snippet.node, target=task.target, owner=owner)
    kept = frozenset(ast.dump(decorator) for decorator in node.decorator_list)
    if snippet.comments:
        task.insert(begin, reindent(snippet.comments, "", indent) + "\n")
    text = snippet.named(node.name, without=kept, references=not owner)
    task.change(document.start(node), document.full_end(node), _hanging(text, indent))


def _replace_class(task: Task) -> None:
    document, patch = task.document, task.patch
    definition, node = class_named(task)
    indent, start = document.indent(node), document.span(node)[0]
    if patch.replacement_source and patch.replacement is None:
        text = external_import(task, node.name)
        if text is None:
            return
    else:
        snippet = snippet_of(task, patch.replacement, name_map=patch.name_map)
        if not isinstance(snippet.node, ast.ClassDef):
            raise _wrong_kind(task, snippet, "class")
        ours, theirs = _methods(snippet.document, snippet.node), _methods(document, node)
        pairs = [(theirs[name], ours[name]) for name in theirs if name in ours]
        snippet = with_new_names(task, snippet, pairs)
        if not patch.allow_signature_change:
            ours = _methods(snippet.document, snippet.node)
            for name in (name for name in theirs if name in ours):
                target = f"{task.target}.{name}"
                check_signature(task, theirs[name], ours[name], target=target, owner=task.target)
        text = with_comments(snippet, snippet.named(node.name, references=True))
    task.mark(document.line_start(start), f"{indent}{task.marker('PATCHED CLASS', definition.qualname)}\n")
    task.change(start, document.full_end(node), _hanging(text, indent))


def _import_function(task: Task, node: FunctionNode, marker: str) -> None:
    """Replace a function with an import; upstream's decorators are applied to it by calls."""
    document = task.document
    start, indent = document.span(node)[0], document.indent(node)
    statement = external_import(task, node.name)
    if statement is None:
        return
    lines = [statement]
    lines += [
        f"{node.name} = {document.source[document.start(d) : document.end(d)]}({node.name})"
        for d in reversed(node.decorator_list)
    ]
    task.mark(document.line_start(start), f"{indent}{marker}\n")
    task.change(start, document.full_end(node), _hanging("\n".join(lines), indent))


def _methods(document: Document, node: ast.AST) -> dict[str, FunctionNode]:
    """Methods of a class by name; a property's accessors are separate."""
    return {
        f"{d.node.name}.{d.accessor}".rstrip("."): d.node
        for d in document.definitions()
        if d.parents[-1] is node and isinstance(d.node, FUNCTIONS)
    }


def _check_bindings(task: Task, node: FunctionNode, replacement: FunctionNode) -> None:
    theirs, ours = (
        {d.id for d in function.decorator_list if isinstance(d, ast.Name) and d.id in _BINDINGS}
        for function in (node, replacement)
    )
    clash = ours - theirs
    if clash and theirs:
        raise task.error(
            ReplacementError,
            f"upstream's {node.name} is a {'/'.join(theirs)}, its replacement a {'/'.join(clash)}",
            "drop the replacement's decorator: upstream's stays on the method",
        )


def _wrong_kind(task: Task, snippet: Snippet, wanted: str) -> ReplacementError:
    actual = "class" if isinstance(snippet.node, ast.ClassDef) else "function"
    return task.error(
        ReplacementError,
        f"the replacement {snippet.node.name} is a {actual}; {task.target} is a {wanted}",
        f"replace it with a {wanted}",
    )


def _hanging(text: str, indent: str) -> str:
    """``text`` indented, except its first line, which is inserted after existing indentation."""
    moved = reindent(text, "", indent)
    return moved.removeprefix(indent)

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
from veomni_hook.patches.plan import Plan
from veomni_hook.patches.spec import PatchType
from veomni_hook.patches.verbs.external import external_function, external_import
from veomni_hook.patches.verbs.signature import check_signature, with_new_names
from veomni_hook.patches.verbs.snippets import snippet_of
from veomni_hook.patches.verbs.targets import class_named, resolve

__all__ = ["plan_replacements", "replace_function_text"]

_BINDINGS = frozenset({"staticmethod", "classmethod", "property", "cached_property"})


def plan_replacements(plan: Plan) -> None:
    """Plan every replacement of a class or function.

    Raises:
        PatchTargetError: the target is missing.
        ReplacementError, SignatureError, NameMapError: see `snippet_of` and `check_signature`.
    """
    for index, _ in plan.of_kind(PatchType.CLASS_REPLACEMENT.value):
        _replace_class(plan, index)
    for index, step in plan.of_kind(PatchType.FUNCTION_REPLACEMENT.value):
        hint = "use override_method for a method, or " if "." in step.target else ""
        where = plan.where(index)
        definition = resolve(plan.document, step.target, ("function",), where=where, hint=hint)
        if isinstance(definition.node, FUNCTIONS):
            marker = plan.marker(index, "PATCHED FUNCTION", definition.qualname)
            replace_function_text(plan, index, definition.node, marker)


def replace_function_text(
    plan: Plan, index: int, node: FunctionNode, marker: str, *, owner: str = "", accessor: str = ""
) -> None:
    """Plan to replace ``node``, in class ``owner`` if any, with the replacement of step ``index``."""
    document, step = plan.document, plan.steps[index]
    indent = document.indent(node)
    begin = document.line_start(document.span(node)[0])
    patch = step.patch
    if patch.replacement_source and patch.replacement is None:
        _import_function(plan, index, node, marker)
        external = external_function(patch.replacement_source)
        # Without ``**kwargs``, a name that it does not take is an error when it is called.
        if external is not None and external.args.kwarg and not patch.allow_signature_change:
            check_signature(plan, index, node, external, target=step.target, owner=owner)
        return
    plan.mark(index, begin, f"{indent}{marker}\n")
    snippet = snippet_of(plan, index, patch.replacement, name_map=patch.name_map, accessor=accessor)
    replacement = snippet.node
    if not isinstance(replacement, FUNCTIONS):
        raise _wrong_kind(plan, index, snippet, "function")
    _check_bindings(plan, index, node, replacement)
    snippet = with_new_names(plan, index, snippet, [(node, replacement)])
    if not patch.allow_signature_change and isinstance(snippet.node, FUNCTIONS):
        check_signature(plan, index, node, snippet.node, target=step.target, owner=owner)
    kept = frozenset(ast.dump(decorator) for decorator in node.decorator_list)
    if snippet.comments:
        plan.insert(index, begin, reindent(snippet.comments, "", indent) + "\n")
    text = snippet.named(node.name, without=kept, references=not owner)
    plan.change(index, document.start(node), document.full_end(node), _hanging(text, indent))


def _replace_class(plan: Plan, index: int) -> None:
    document, step = plan.document, plan.steps[index]
    where, patch = plan.where(index), plan.steps[index].patch
    definition, node = class_named(document, step.target, where=where)
    indent = document.indent(node)
    start = document.span(node)[0]
    marker = f"{indent}{plan.marker(index, 'PATCHED CLASS', definition.qualname)}\n"
    if patch.replacement_source and patch.replacement is None:
        text = external_import(plan, index, node.name)
        if text is not None:
            plan.mark(index, document.line_start(start), marker)
            plan.change(index, start, document.full_end(node), _hanging(text, indent))
        return
    plan.mark(index, document.line_start(start), marker)
    snippet = snippet_of(plan, index, patch.replacement, name_map=patch.name_map)
    if not isinstance(snippet.node, ast.ClassDef):
        raise _wrong_kind(plan, index, snippet, "class")
    ours, theirs = _methods(snippet.document, snippet.node), _methods(document, node)
    pairs = [(theirs[name], ours[name]) for name in theirs if name in ours]
    snippet = with_new_names(plan, index, snippet, pairs)
    if not patch.allow_signature_change:
        _check_methods(plan, index, node, snippet)
    text = f"{snippet.comments}\n{snippet.named(node.name, references=True)}".removeprefix("\n")
    plan.change(index, start, document.full_end(node), _hanging(text, indent))


def _import_function(plan: Plan, index: int, node: FunctionNode, marker: str) -> None:
    """Replace a function with an import; upstream's decorators are applied to it by calls."""
    document = plan.document
    start, indent = document.span(node)[0], document.indent(node)
    statement = external_import(plan, index, node.name)
    if statement is None:
        return
    lines = [statement]
    lines += [
        f"{node.name} = {document.source[document.start(d) : document.end(d)]}({node.name})"
        for d in reversed(node.decorator_list)
    ]
    plan.mark(index, document.line_start(start), f"{indent}{marker}\n")
    plan.change(index, start, document.full_end(node), _hanging("\n".join(lines), indent))


def _check_methods(plan: Plan, index: int, original: ast.ClassDef, snippet: Snippet) -> None:
    step = plan.steps[index]
    new = _methods(snippet.document, snippet.node)
    for name, method in _methods(plan.document, original).items():
        if name in new:
            target = f"{step.target}.{name}"
            check_signature(plan, index, method, new[name], target=target, owner=step.target)


def _methods(document: Document, node: ast.AST) -> dict[str, FunctionNode]:
    """Methods of a class by name; a property's accessors are separate."""
    return {
        f"{d.node.name}.{d.accessor}".rstrip("."): d.node
        for d in document.definitions()
        if d.parents[-1] is node and isinstance(d.node, FUNCTIONS)
    }


def _check_bindings(plan: Plan, index: int, node: FunctionNode, replacement: FunctionNode) -> None:
    def bindings(function: FunctionNode) -> set[str]:
        return {d.id for d in function.decorator_list if isinstance(d, ast.Name) and d.id in _BINDINGS}

    clash = bindings(replacement) - bindings(node)
    if clash and bindings(node):
        raise ReplacementError(
            f"upstream's {node.name} is a {'/'.join(bindings(node))}, its replacement a {'/'.join(clash)}",
            where=plan.where(index),
            fix="drop the replacement's decorator: upstream's stays on the method",
            target=plan.steps[index].target,
        )


def _wrong_kind(plan: Plan, index: int, snippet: Snippet, wanted: str) -> ReplacementError:
    found = "class" if isinstance(snippet.node, ast.ClassDef) else "function"
    return ReplacementError(
        f"the replacement {snippet.node.name} is a {found}; {plan.steps[index].target} is a {wanted}",
        where=plan.where(index),
        fix=f"replace it with a {wanted}",
        target=plan.steps[index].target,
    )


def _hanging(text: str, indent: str) -> str:
    """``text`` indented, except its first line, which is inserted after existing indentation."""
    moved = reindent(text, "", indent)
    return moved.removeprefix(indent)

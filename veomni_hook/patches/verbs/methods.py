"""Override methods of a class or add methods to it, for any layout of its body."""

from __future__ import annotations

import ast
import re

from veomni_hook.errors import PatchTargetError, ReplacementError
from veomni_hook.patches.code.document import ACCESSORS, Document, has_docstring, statements_of
from veomni_hook.patches.code.edit import before_blanks, reindent
from veomni_hook.patches.code.nearest_names import is_near_miss, listed, nearest
from veomni_hook.patches.plan import Plan, Task
from veomni_hook.patches.spec import PatchType
from veomni_hook.patches.verbs.external import external_import
from veomni_hook.patches.verbs.init import inherited_init, init_factory, plan_own_init
from veomni_hook.patches.verbs.replace import replace_function_text
from veomni_hook.patches.verbs.snippets import snippet_of, with_comments
from veomni_hook.patches.verbs.targets import class_named, function_named, members, method_names

__all__ = ["plan_methods"]

_SEMICOLON = re.compile(r"[ \t\f]*;")


#: What is added to a class: its name and node, then the texts with their tasks.
_Additions = dict[tuple[str, ast.ClassDef], list[tuple[Task, str]]]


def plan_methods(plan: Plan) -> None:
    """Plan every override and addition of methods, and every modification of ``__init__``.

    Raises:
        PatchTargetError: the class or an overridden method is missing, or an added method already exists.
        ReplacementError, SignatureError, NameMapError: see `snippet_of` and `check_signature`.
    """
    additions: _Additions = {}
    for task in plan.of_kind(PatchType.METHOD_OVERRIDE, PatchType.METHOD_ADDITION):
        owner, method = _split(task)
        definition, node = class_named(task, owner)
        if task.kind == PatchType.METHOD_OVERRIDE and not _is_missing(task, owner, method, node):
            overridden, function = function_named(task, "method")
            marker = task.marker("PATCHED METHOD", overridden.qualname)
            replace_function_text(task, function, marker, owner=owner, accessor=overridden.accessor)
            continue
        if task.kind == PatchType.METHOD_ADDITION and method in members(node):
            line = plan.document.lineno(plan.document.start(members(node)[method]))
            raise task.error(
                PatchTargetError,
                f"{owner}.{method} is there already (line {line})",
                "use override_method to replace it, or add the method under another name",
                nearest=(f"{owner}.{method}",),
            )
        task.kind = PatchType.METHOD_ADDITION.value
        text = _new_text(task, method)
        if text is not None:
            additions.setdefault((definition.qualname, node), []).append((task, text))
    for task in plan.of_kind(PatchType.INIT_MODIFICATION):
        definition, node = class_named(task)
        before = additions.setdefault((definition.qualname, node), [])
        if "__init__" in members(node):
            plan_own_init(task, node)
        elif any(other.target == f"{task.target}.__init__" for other, _ in before):
            before.append((task, init_factory(task, None)))
        else:
            before.append((task, inherited_init(task, node)))
    for (qualname, node), added in additions.items():
        if added:
            _add(plan.document, qualname, node, added)


def _body_indent(document: Document, node: ast.ClassDef) -> str:
    """Indentation of the statements in a class body, also for a body without its own line."""
    lines = [statement for statement in node.body if document.begins_line(statement)]
    if lines:
        return document.indent(lines[0])
    unit = next(
        (
            document.indent(inner)[len(document.indent(outer)) :]
            for outer in document.tree.body
            if isinstance(outer, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in outer.body
            if document.begins_line(inner)
        ),
        "    ",
    )
    return document.indent(node) + (unit or "    ")


def _split(task: Task) -> tuple[str, str]:
    owner, _, method = task.target.rpartition(".")
    if method in ACCESSORS:
        owner, _, name = owner.rpartition(".")
        method = f"{name}.{method}"
    if not owner:
        classes = [d.qualname for d in task.document.definitions() if d.kind == "class"]
        close = nearest(task.target, classes)
        raise task.error(
            PatchTargetError,
            f"{task.target} names no method: a method's target is Class.method",
            f"name the class too (nearest: {listed(close)}), or use replace_function",
            nearest=close,
        )
    return owner, method


def _is_missing(task: Task, owner: str, method: str, node: ast.ClassDef) -> bool:
    """Whether an override must become an addition, which only lenient configs may do."""
    if any(d.kind == "method" for d in task.document.find(f"{owner}.{method}")):
        return False
    existing = method_names(node)
    close = [name for name in existing if is_near_miss(method, name)]
    if task.step.config.lenient and not close:
        return True
    named = tuple(f"{owner}.{name}" for name in close or nearest(method, existing))
    is_assigned = method in members(node)
    raise task.error(
        PatchTargetError,
        f"{owner}.{method} is assigned, not defined with def"
        if is_assigned
        else f"{owner} has no method {method}",
        f"correct the target (nearest: {listed(named)}; methods there: {listed(existing)}), "
        "or use add_method if it is meant to be new",
        nearest=named,
    )


def _new_text(task: Task, method: str) -> str | None:
    patch = task.patch
    name, _, accessor = method.partition(".")
    if patch.replacement_source and patch.replacement is None:
        return external_import(task, name)
    snippet = snippet_of(task, patch.replacement, name_map=patch.name_map, accessor=accessor)
    if isinstance(snippet.node, ast.ClassDef):
        raise task.error(
            ReplacementError,
            f"the method {task.target} cannot be the class {snippet.node.name}",
            "use a function",
        )
    return with_comments(snippet, snippet.named(name))


def _add(document: Document, qualname: str, node: ast.ClassDef, added: list[tuple[Task, str]]) -> None:
    indent = _body_indent(document, node)
    offset = document.full_end(node)
    first, text = added[0]
    rest = statements_of(node)
    placeholder = rest[0] if len(rest) == 1 and _is_placeholder(rest[0]) else None
    inline = not document.begins_line(node.body[0])
    leads = placeholder is not None and not has_docstring(node)
    if inline and placeholder is node.body[0]:
        end = document.end(placeholder)
        semicolon = _SEMICOLON.match(document.source, end)
        end = semicolon.end() if semicolon else end
        first.change(before_blanks(document, document.start(placeholder)), end, "")
    elif inline:
        start = document.start(node.body[0])
        first.change(before_blanks(document, start), start, f"\n{indent}")
    elif placeholder is not None and document.begins_line(placeholder):
        if document.full_end(placeholder) == document.end(placeholder) == offset:
            # Only the placeholder is in its line: the first method replaces that line.
            start = document.start(placeholder)
            first.mark(document.line_start(start), f"{indent}{_marker(first, qualname)}\n")
            first.change(start, offset, reindent(text, "", indent).lstrip(" \t"))
            added, leads = added[1:], False
        else:
            end = document.end(placeholder)
            while end < len(document.source) and document.source[end] in " \t\f;":
                end += 1
            first.change(document.start(placeholder), end, "")
    for number, (task, text) in enumerate(added):
        gap = 0 if leads and not number else 1
        task.append(offset, text, _marker(task, qualname), indent=indent, gap=gap)


def _marker(task: Task, qualname: str) -> str:
    if task.kind == PatchType.INIT_MODIFICATION:
        return task.marker("MODIFIED INIT", f"{qualname}.__init__")
    method = task.target.rpartition(".")[2]
    return task.marker("ADDED METHOD", f"{qualname}.{method}")


def _is_placeholder(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value is Ellipsis
    return isinstance(statement, ast.Pass)

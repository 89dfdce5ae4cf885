"""Override methods of a class or add methods to it, for any layout of its body."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from veomni_hook.errors import PatchTargetError, ReplacementError
from veomni_hook.patches.code.document import Document, has_docstring
from veomni_hook.patches.code.edit import reindent
from veomni_hook.patches.code.nearest_names import is_near_miss, listed, nearest
from veomni_hook.patches.code.snippet import Snippet
from veomni_hook.patches.plan import Plan, Step
from veomni_hook.patches.spec import PatchType
from veomni_hook.patches.verbs.external import external_import
from veomni_hook.patches.verbs.init import inherited_init, init_factory, plan_own_init
from veomni_hook.patches.verbs.replace import replace_function_text
from veomni_hook.patches.verbs.snippets import snippet_of
from veomni_hook.patches.verbs.targets import class_named, members, method_names, resolve

__all__ = ["body_indent", "plan_methods"]

_ACCESSORS = ("setter", "deleter")
_SEMICOLON = re.compile(r"[ \t\f]*;")


@dataclass(frozen=True)
class _Addition:
    index: int
    text: str


def plan_methods(plan: Plan) -> None:
    """Plan every override and addition of methods, and every modification of ``__init__``.

    Raises:
        PatchTargetError: the class or an overridden method is missing, or an added method already exists.
        ReplacementError, SignatureError, NameMapError: see `snippet_of` and `check_signature`.
    """
    additions: dict[str, list[_Addition]] = {}
    for index, step in plan.of_kind(PatchType.METHOD_OVERRIDE.value, PatchType.METHOD_ADDITION.value):
        owner, method = _split(plan, index)
        definition, node = class_named(plan.document, owner, where=plan.where(index), declared=step.target)
        if step.kind == PatchType.METHOD_OVERRIDE.value and not _is_missing(plan, index, owner, method, node):
            _override(plan, index, step, owner)
            continue
        if step.kind == PatchType.METHOD_ADDITION.value and method in members(node):
            line = plan.document.lineno(plan.document.start(members(node)[method]))
            raise PatchTargetError(
                f"{owner}.{method} is there already (line {line})",
                where=plan.where(index),
                fix="use override_method to replace it, or add the method under another name",
                target=step.target,
                nearest=(f"{owner}.{method}",),
            )
        plan.kinds[index] = PatchType.METHOD_ADDITION.value
        text = _new_text(plan, index, method)
        if text is not None:
            additions.setdefault(definition.qualname, []).append(_Addition(index, text))
    for index, step in plan.of_kind(PatchType.INIT_MODIFICATION.value):
        definition, node = class_named(plan.document, step.target, where=plan.where(index))
        before = additions.setdefault(definition.qualname, [])
        if "__init__" in members(node):
            plan_own_init(plan, index, node)
        elif any(plan.steps[one.index].target == f"{step.target}.__init__" for one in before):
            before.append(_Addition(index, init_factory(plan, index, None)))
        else:
            before.append(_Addition(index, inherited_init(plan, index, node)))
    for qualname, added in additions.items():
        if added:
            _add(plan, qualname, added)


def body_indent(document: Document, node: ast.ClassDef) -> str:
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


def _split(plan: Plan, index: int) -> tuple[str, str]:
    target = plan.steps[index].target
    owner, _, method = target.rpartition(".")
    if method in _ACCESSORS:
        owner, _, name = owner.rpartition(".")
        method = f"{name}.{method}"
    if not owner:
        classes = [d.qualname for d in plan.document.definitions() if d.kind == "class"]
        raise PatchTargetError(
            f"{target} names no method: a method's target is Class.method",
            where=plan.where(index),
            fix=f"name the class too (nearest: {listed(nearest(target, classes))}), or use replace_function",
            target=target,
            nearest=nearest(target, classes),
        )
    return owner, method


def _is_missing(plan: Plan, index: int, owner: str, method: str, node: ast.ClassDef) -> bool:
    """Whether an override must become an addition, which only lenient configs may do."""
    step = plan.steps[index]
    if any(d.kind == "method" for d in plan.document.find(f"{owner}.{method}")):
        return False
    existing = method_names(node)
    close = [name for name in existing if is_near_miss(method, name)]
    if step.lenient and not close:
        return True
    named = tuple(f"{owner}.{name}" for name in close or nearest(method, existing))
    if method in members(node):
        what = f"{owner}.{method} is assigned, not defined with def"
    else:
        what = f"{owner} has no method {method}"
    raise PatchTargetError(
        what,
        where=plan.where(index),
        fix=f"correct the target (nearest: {listed(named)}; methods there: {listed(existing)}), "
        "or use add_method if it is meant to be new",
        target=step.target,
        nearest=named,
    )


def _override(plan: Plan, index: int, step: Step, owner: str) -> None:
    definition = resolve(plan.document, step.target, ("method",), where=plan.where(index))
    node = definition.node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise TypeError(f"{definition.qualname} is no function")
    marker = plan.marker(index, "PATCHED METHOD", definition.qualname)
    replace_function_text(plan, index, node, marker, owner=owner, accessor=definition.accessor)


def _new_text(plan: Plan, index: int, method: str) -> str | None:
    step = plan.steps[index]
    patch = step.patch
    name, _, accessor = method.partition(".")
    if patch.replacement_source and patch.replacement is None:
        return external_import(plan, index, name)
    snippet = snippet_of(plan, index, patch.replacement, name_map=patch.name_map, accessor=accessor)
    _require_function(plan, index, snippet)
    return f"{snippet.comments}\n{snippet.named(name)}".removeprefix("\n")


def _require_function(plan: Plan, index: int, snippet: Snippet) -> None:
    if isinstance(snippet.node, ast.ClassDef):
        raise ReplacementError(
            f"the method {plan.steps[index].target} cannot be the class {snippet.node.name}",
            where=plan.where(index),
            fix="use a function",
            target=plan.steps[index].target,
        )


def _add(plan: Plan, qualname: str, added: list[_Addition]) -> None:
    document = plan.document
    _, node = class_named(document, qualname, where=plan.where(added[0].index))
    indent = body_indent(document, node)
    offset = document.full_end(node)
    first = added[0].index
    rest = node.body[1:] if has_docstring(node) else node.body
    placeholder = rest[0] if len(rest) == 1 and _is_placeholder(rest[0]) else None
    inline = not document.begins_line(node.body[0])
    if inline and placeholder is node.body[0]:
        end = document.end(placeholder)
        semicolon = _SEMICOLON.match(document.source, end)
        end = semicolon.end() if semicolon else end
        plan.change(first, _before_blanks(document, document.start(placeholder)), end, "")
    elif inline:
        start = document.start(node.body[0])
        plan.change(first, _before_blanks(document, start), start, f"\n{indent}")
    elif placeholder is not None and document.begins_line(placeholder):
        if document.full_end(placeholder) == document.end(placeholder) == offset:
            # Only the placeholder is in its line: the first method replaces that line.
            start = document.start(placeholder)
            plan.mark(first, document.line_start(start), f"{indent}{_marker(plan, first, qualname)}\n")
            plan.change(first, start, offset, reindent(added[0].text, "", indent).lstrip(" \t"))
            added = added[1:]
        else:
            end = document.end(placeholder)
            plan.change(first, document.start(placeholder), _after_blanks(document, end), "")
    leading = placeholder is not None and added and added[0].index == first and not has_docstring(node)
    for number, addition in enumerate(added):
        if number or not leading:
            plan.insert(addition.index, offset, "\n")
        plan.mark(addition.index, offset, f"\n{indent}{_marker(plan, addition.index, qualname)}")
        plan.insert(addition.index, offset, "\n" + reindent(addition.text, "", indent))


def _marker(plan: Plan, index: int, qualname: str) -> str:
    if plan.steps[index].kind == PatchType.INIT_MODIFICATION.value:
        return plan.marker(index, "MODIFIED INIT", f"{qualname}.__init__")
    method = plan.steps[index].target.rpartition(".")[2]
    return plan.marker(index, "ADDED METHOD", f"{qualname}.{method}")


def _is_placeholder(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value is Ellipsis
    return isinstance(statement, ast.Pass)


def _before_blanks(document: Document, offset: int) -> int:
    while document.source[offset - 1] in " \t\f":
        offset -= 1
    return offset


def _after_blanks(document: Document, offset: int) -> int:
    while offset < len(document.source) and document.source[offset] in " \t\f;":
        offset += 1
    return offset

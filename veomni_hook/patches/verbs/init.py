"""``modify_init``: the config's function becomes ``__init__`` and gets upstream's as its first argument.

Upstream's ``__init__`` keeps its text. A factory after it takes it as an argument and returns the new one.
So the function can use its own parameter name for the original, and ``super()`` without arguments works in
both. The new ``__init__`` has the metadata of the original (signature, docstring, annotations).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from veomni_hook.errors import PatchTargetError, ReplacementError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, apply_edits, reindent
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.tree import FUNCTIONS, decorator_name, walk_ast
from veomni_hook.patches.plan import Plan
from veomni_hook.patches.verbs.signature import check_signature
from veomni_hook.patches.verbs.snippets import snippet_of
from veomni_hook.patches.verbs.targets import members

__all__ = ["inherited_init", "init_factory", "plan_own_init"]

_COMMA = re.compile(r"(?:\s|#[^\n]*\n|\\\n)*,(?:[ \t]|\\\n)*")
_FACTORY = """\
def _modify_init({original}):
    from functools import update_wrapper

{function}

    return update_wrapper(__init__, {original})

__init__ = _modify_init(__init__)
del _modify_init"""
_FORWARD = """\
def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)

"""


def plan_own_init(plan: Plan, index: int, node: ast.ClassDef) -> None:
    """Plan the factory after the statement of a class body that defines ``__init__``.

    Raises:
        ReplacementError, SignatureError: the function cannot replace that ``__init__``.
    """
    document = plan.document
    own = members(node)["__init__"]
    holder = next(child for child in node.body if any(inner is own for inner in walk_ast(child)))
    if not document.begins_line(holder):
        raise PatchTargetError(
            f"__init__ of {plan.steps[index].target} stands in one line with other code",
            where=plan.where(index),
            fix="use replace_class",
            target=plan.steps[index].target,
        )
    indent, offset = document.indent(holder), document.full_end(holder)
    text = init_factory(plan, index, own)
    marker = plan.marker(index, "MODIFIED INIT", f"{plan.steps[index].target}.__init__")
    plan.insert(index, offset, "\n")
    plan.mark(index, offset, f"\n{indent}{marker}")
    plan.insert(index, offset, "\n" + reindent(text, "", indent))


def inherited_init(plan: Plan, index: int, node: ast.ClassDef) -> str:
    """Text for a class without its own ``__init__``: one that calls the inherited one, and the factory.

    Raises:
        PatchTargetError: no base can give the class an ``__init__``.
        ReplacementError: the function cannot be an ``__init__``.
    """
    target = plan.steps[index].target
    reason = ""
    if any(decorator_name(decorator) == "dataclass" for decorator in node.decorator_list):
        reason = "@dataclass writes it when the class is made"
    elif not _can_inherit_init(plan.document, node, set()):
        reason = "and it has no base that could give it one"
    if reason:
        classes = [
            d.qualname
            for d in plan.document.definitions()
            if isinstance(d.node, ast.ClassDef) and "__init__" in members(d.node)
        ]
        close = nearest(target, classes)
        raise PatchTargetError(
            f"{target} has no __init__ to modify: {reason}",
            where=plan.where(index),
            fix=f"add one with add_method, or name a class that has one; nearest: {listed(close)}",
            target=target,
            nearest=close,
        )
    forward = _FORWARD
    if len(node.bases) == 1 and isinstance(node.bases[0], ast.Name | ast.Attribute):
        # For inspect.signature: the signature that the class had before.
        forward += f"__init__.__wrapped__ = {ast.unparse(node.bases[0])}.__init__\n\n"
    return forward + init_factory(plan, index, None)


def init_factory(plan: Plan, index: int, original: ast.stmt | None) -> str:
    """Text, without indentation, that replaces ``__init__`` with the function of step ``index``.

    Raises:
        ReplacementError: the function's parameters are not ``(original_init, self, ...)``.
        SignatureError: it drops parameters of ``original``.
    """
    step, where = plan.steps[index], plan.where(index)

    def wrong(what: str) -> ReplacementError:
        return ReplacementError(
            f"modify_init of {step.target}: {what}",
            where=where,
            fix="write it as def name(original_init, self, *args, **kwargs), and call original_init in it",
            target=step.target,
        )

    snippet = snippet_of(plan, index, step.patch.replacement)
    function, document = snippet.node, snippet.document
    if not isinstance(function, ast.FunctionDef):
        raise wrong("the replacement is no plain function")
    given = [*function.args.posonlyargs, *function.args.args]
    if not given:
        raise wrong(f"{function.name} takes no original_init")
    first = given[0].arg
    if not any(isinstance(n, ast.Name) and n.id == first for child in function.body for n in walk_ast(child)):
        raise wrong(f"{function.name} never calls {first}, so upstream's __init__ would be lost")
    text = apply_edits(document.source, _as_init(document, function))
    try:
        changed = Document(text).tree.body[0]
    except SyntaxError:
        raise wrong(f"{function.name} has no ordinary parameter after {first}") from None
    if not isinstance(changed, ast.FunctionDef):
        raise TypeError(f"a function became {type(changed).__name__}")
    if isinstance(original, FUNCTIONS) and not step.patch.allow_signature_change:
        check_signature(plan, index, original, changed, target=f"{step.target}.__init__", owner=step.target)
    factory = _FACTORY.format(original=first, function=reindent(text, "", "    "))
    return f"{snippet.comments}\n{factory}".removeprefix("\n")


def _as_init(document: Document, function: ast.FunctionDef) -> Iterator[Edit]:
    start = document.source.index(function.name, document.start(function) + len("def"))
    yield Edit(start, start + len(function.name), "__init__")
    first = [*function.args.posonlyargs, *function.args.args][0]
    comma = _COMMA.match(document.source, document.end(first))
    yield Edit(document.start(first), comma.end() if comma else document.end(first), "")


def _can_inherit_init(document: Document, node: ast.ClassDef, seen: set[str]) -> bool:
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else ""
        if name == "object" or (name and name in seen):
            continue
        known = [d.node for d in document.find(name) if isinstance(d.node, ast.ClassDef)] if name else []
        if not known or any(
            "__init__" in members(parent) or _can_inherit_init(document, parent, {*seen, name})
            for parent in known
        ):
            return True
    return False

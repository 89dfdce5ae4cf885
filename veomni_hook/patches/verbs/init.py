"""``modify_init``: the config's function becomes ``__init__`` and gets upstream's as its first argument.

Upstream's ``__init__`` keeps its text. A factory after it takes it as an argument and returns the new one.
So the function can use its own parameter name for the original, and ``super()`` without arguments works in
both. The new ``__init__`` has the metadata of the original (signature, docstring, annotations).
"""

from __future__ import annotations

import ast
import re

from veomni_hook.errors import PatchTargetError, ReplacementError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, apply_edits, reindent
from veomni_hook.patches.code.tree import FUNCTIONS, decorator_name, walk_ast
from veomni_hook.patches.plan import Task
from veomni_hook.patches.verbs.signature import check_signature
from veomni_hook.patches.verbs.snippets import snippet_of, with_comments
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


def plan_own_init(task: Task, node: ast.ClassDef) -> None:
    """Plan the factory after the statement of a class body that defines ``__init__``.

    Raises:
        ReplacementError, SignatureError: the function cannot replace that ``__init__``.
    """
    document = task.document
    own = members(node)["__init__"]
    holder = next(child for child in node.body if any(inner is own for inner in walk_ast(child)))
    if not document.begins_line(holder):
        raise task.error(
            PatchTargetError,
            f"__init__ of {task.target} stands in one line with other code",
            "use replace_class",
        )
    text = init_factory(task, own)
    marker = task.marker("MODIFIED INIT", f"{task.target}.__init__")
    task.append(document.full_end(holder), text, marker, indent=document.indent(holder))


def inherited_init(task: Task, node: ast.ClassDef) -> str:
    """Text for a class without its own ``__init__``: one that calls the inherited one, and the factory.

    Raises:
        PatchTargetError: no base can give the class an ``__init__``.
        ReplacementError: the function cannot be an ``__init__``.
    """
    reason = ""
    if any(decorator_name(decorator) == "dataclass" for decorator in node.decorator_list):
        reason = "@dataclass writes it when the class is made"
    elif not _can_inherit_init(task.document, node, set()):
        reason = "and it has no base that could give it one"
    if reason:
        raise task.missing(
            f"{task.target} has no __init__ to modify: {reason}",
            "add one with add_method, or name a class that has one; nearest",
            task.target,
            [
                d.qualname
                for d in task.document.definitions()
                if isinstance(d.node, ast.ClassDef) and "__init__" in members(d.node)
            ],
        )
    forward = _FORWARD
    if len(node.bases) == 1 and isinstance(node.bases[0], ast.Name | ast.Attribute):
        # For inspect.signature: the signature that the class had before.
        forward += f"__init__.__wrapped__ = {ast.unparse(node.bases[0])}.__init__\n\n"
    return forward + init_factory(task, None)


def init_factory(task: Task, original: ast.stmt | None) -> str:
    """Text, without indentation, that replaces ``__init__`` with the function of a step.

    Raises:
        ReplacementError: the function's parameters are not ``(original_init, self, ...)``.
        SignatureError: it drops parameters of ``original``.
    """

    def wrong(what: str) -> ReplacementError:
        return task.error(
            ReplacementError,
            f"modify_init of {task.target}: {what}",
            "write it as def name(original_init, self, *args, **kwargs), and call original_init in it",
        )

    snippet = snippet_of(task, task.patch.replacement)
    function, document = snippet.node, snippet.document
    if not isinstance(function, ast.FunctionDef):
        raise wrong("the replacement is no plain function")
    parameters = [*function.args.posonlyargs, *function.args.args]
    if not parameters:
        raise wrong(f"{function.name} takes no original_init")
    first = parameters[0].arg
    if not any(isinstance(n, ast.Name) and n.id == first for child in function.body for n in walk_ast(child)):
        raise wrong(f"{function.name} never calls {first}, so upstream's __init__ would be lost")
    name = document.source.index(function.name, document.start(function) + len("def"))
    comma = _COMMA.match(document.source, document.end(parameters[0]))
    end = comma.end() if comma else document.end(parameters[0])
    edits = [
        Edit(name, name + len(function.name), "__init__"),
        Edit(document.start(parameters[0]), end, ""),
    ]
    text = apply_edits(document.source, edits)
    try:
        changed = Document(text).tree.body[0]
    except SyntaxError:
        raise wrong(f"{function.name} has no ordinary parameter after {first}") from None
    if not isinstance(changed, ast.FunctionDef):
        raise TypeError(f"a function became {type(changed).__name__}")
    if isinstance(original, FUNCTIONS) and not task.patch.allow_signature_change:
        check_signature(task, original, changed, target=f"{task.target}.__init__", owner=task.target)
    factory = _FACTORY.format(original=first, function=reindent(text, "", "    "))
    return with_comments(snippet, factory)


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

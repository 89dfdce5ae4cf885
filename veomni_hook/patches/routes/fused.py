"""The copy of a method in which kernels may take over several statements.

Upstream's method stays as it is, line by line: tools search its source for lines, and replace them. Where a
kernel may take over, the method begins with a question. If the answer is yes, a function of the module goes
on: the same method with the guards. It is no method, so that it also serves a method that another class
borrows, and classes that `adopt` changes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from veomni_hook.patches.code.document import Definition, Document, FunctionNode, has_docstring
from veomni_hook.patches.code.edit import FUSED, PLAIN, Edit, apply_edits, marker_comment
from veomni_hook.patches.code.expressions import decorator_name
from veomni_hook.patches.code.placement import at_start
from veomni_hook.patches.code.reindent import reindent
from veomni_hook.patches.code.scope import loaded, names_in, own_names
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.code.wrap import wrapped

__all__ = ["asked_first", "copy_name", "method_at", "with_copies"]


def copy_name(qualname: str) -> str:
    """The name of the copy of a method, a function of its module."""
    return f"veomni_{qualname.replace('.', '_')}"


def method_at(document: Document, offset: int) -> Definition | None:
    """The method of a class that contains an offset, if a function beside the class can do the same."""
    functions = [
        one
        for one in document.definitions()
        if isinstance(one.node, FunctionNode) and document.start(one.node) <= offset < document.end(one.node)
    ]
    if [one.kind for one in functions] != ["method"]:
        return None
    (method,) = functions
    return (
        method if len(method.parents) == len(("module", "class")) and _can_leave(document, method) else None
    )


def _can_leave(document: Document, method: Definition) -> bool:
    """Whether the method means the same beside its class."""
    node, owner = _function(method), method.parents[-1]
    names = names_in(node)
    attributes = {one.attr for one in walk_ast(node) if isinstance(one, ast.Attribute)}
    of_class = own_names(owner.body) if isinstance(owner, ast.ClassDef) else set()
    header = loaded([node.args, *([node.returns] if node.returns else [])])
    return (
        len(document.find(method.qualname)) == 1
        and not names & {"super", "__class__"}
        and not any(name.startswith("__") and not name.endswith("__") for name in names | attributes)
        and not of_class.intersection(header)
        and not {decorator_name(one) for one in node.decorator_list} & {"staticmethod", "classmethod"}
    )


def asked_first(document: Document, method: Definition, routed: Iterable[Edit]) -> Iterator[Edit]:
    """The edits that let a method go on in its copy, with the comments of the guards there.

    Args:
        document: the module.
        method: the method.
        routed: the edits of routes in the method.
    """
    routed, node = list(routed), _function(method)
    place = at_start(document, node)
    questions: dict[str, dict[int, None]] = {}
    for edit in routed:
        if edit.fuses:
            questions.setdefault(edit.fuses, {})[edit.patch] = None
    call = f"{copy_name(method.qualname)}({', '.join(_handed_on(node))})"
    for question, patches in questions.items():
        marks = {e.text.strip(): e.patch for e in routed if e.marker and e.form and e.patch in patches}
        for text, patch in marks.items():
            comment = f"{place.indent}{text}\n"
            yield Edit(place.start, place.start, comment, patch, marker=True, form=PLAIN)
        code = f"{place.indent}if {question}:\n{place.indent}    return {call}\n"
        yield Edit(place.start, place.start, wrapped(code), next(iter(patches)), form=PLAIN)


def with_copies(document: Document, edits: Iterable[Edit], *, markers: bool = True) -> list[Edit]:
    """The edits of upstream's methods, and the insertions of the copies.

    Args:
        document: the module.
        edits: all edits of the module.
        markers: whether copies contain the edits that are markers.
    """
    edits, methods = list(edits), list[Definition]()
    for start in sorted({edit.start for edit in edits if edit.form == FUSED}):
        is_known = methods and start < document.end(methods[-1].node)
        if not is_known and (method := method_at(document, start)) is not None:
            methods.append(method)
    kept = [edit for edit in edits if edit.form != FUSED]
    fused = [edit for edit in edits if edit.form != PLAIN and (markers or not edit.marker)]
    return [*kept, *(_copy(document, method, fused, markers=markers) for method in methods)]


def _copy(document: Document, method: Definition, edits: Sequence[Edit], *, markers: bool) -> Edit:
    node = _function(method)
    start, end = document.start(node), document.next_line(document.full_end(node))
    inside = [
        edit
        for edit in edits
        if start < edit.start < end or (edit.start == end and edit.form == FUSED and edit.inserts)
    ]
    name = document.source.index(node.name, start + len("def"))
    own = [Edit(name, name + len(node.name), copy_name(method.qualname))]
    if has_docstring(node):
        first = node.body[0]
        own.append(
            Edit(document.line_start(document.start(first)), document.next_line(document.end(first)), "")
        )
    shifted = (replace(e, start=e.start - start, end=e.end - start) for e in (*own, *inside))
    indent = document.indent(node)
    text = reindent(f"{indent}{apply_edits(document.source[start:end], shifted)}", indent, "")
    # The name of the copy is longer than that of the method.
    header, rest = text.split("\n", 1)
    text = f"{wrapped(header)}\n{rest}"
    if markers:
        what = f"{method.qualname}, where kernels replace several statements"
        text = f"{marker_comment('FUSED', what)}\n{text}"
    at = document.next_line(document.full_end(method.parents[-1]))
    return Edit(at, at, f"\n\n{text}", min(edit.patch for edit in inside if edit.form == FUSED))


def _handed_on(node: FunctionNode) -> Iterator[str]:
    """The arguments of a call that hands on all parameters."""
    arguments = node.args
    yield from (one.arg for one in (*arguments.posonlyargs, *arguments.args))
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    yield from (f"{one.arg}={one.arg}" for one in arguments.kwonlyargs)
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"


def _function(method: Definition) -> FunctionNode:
    if not isinstance(method.node, FunctionNode):
        raise TypeError(f"{method.qualname} is no function")
    return method.node

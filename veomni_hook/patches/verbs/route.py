"""Routes: insert an idiom's code unchanged into one definition.

Idioms belong to this package, so an error in a route is an `IdiomError`, never a user's mistake.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from veomni_hook.errors import IdiomError
from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit, marker_comment
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.scope import local_names, names_in, own_names
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.plan import Plan, Task
from veomni_hook.patches.routes.compose import composed
from veomni_hook.patches.site import Site
from veomni_hook.patches.spec import PatchType
from veomni_hook.patches.verbs.inplace import mark_statement

__all__ = ["plan_routes"]


def plan_routes(plan: Plan) -> None:
    """Plan the edits of every route; guards and rewrites are already planned.

    Raises:
        IdiomError: an edit is outside the top-level definition that the route names, its code binds a name
            that upstream code uses differently, or two routes are incompatible.
    """
    document = plan.document
    routed: list[Edit] = []
    marks: list[Edit] = []
    for task in plan.of_kind(PatchType.ROUTE):
        site = task.patch.site
        if site is None:
            raise TypeError(f"the route of {task.target} has no site")
        owner = site.target.partition(".")[0]
        # In whole lines: the definitions that may contain the site.
        ranges = [
            (document.line_start(document.span(node)[0]), document.next_line(document.full_end(node)))
            for node in (definition.node for definition in document.find(owner))
        ]
        for edit in site.edits:
            if not any(start <= edit.start and edit.end <= end for start, end in ranges):
                raise _defect(task, f"writes outside of it, at line {document.lineno(edit.start)}")
            routed.append(replace(edit, patch=task.index))
        if not any(edit.marker for edit in site.edits):
            marks += _mark(task, site)
        if taken := _taken(plan, site):
            raise _defect(task, f"binds names that the function uses itself: {listed(sorted(taken))}")
    try:
        plan.edits += composed(document, routed, marks, tuple(plan.edits))
    except ValueError as error:
        task = plan.tasks[routed[-1].patch]
        raise _defect(task, f"does not fit beside other routes: {error}") from error


def _defect(task: Task, what: str) -> IdiomError:
    return task.error(IdiomError, f"{task.step} {what}", "report this as a defect of veomni-hook")


def _mark(task: Task, site: Site) -> Iterator[Edit]:
    """Mark a route that only replaces expressions, above the statement that contains the first of them."""
    document = task.document
    start = min(edit.start for edit in site.edits)
    for definition in document.find(site.target):
        node = definition.node
        if isinstance(node, FunctionNode) and document.start(node) <= start < document.end(node):
            comment = marker_comment("ROUTED", task.step.reason)
            yield replace(mark_statement(document, node, start, comment), patch=task.index)
            return


def _taken(plan: Plan, site: Site) -> set[str]:
    """Names that the route's code binds although they are not its own.

    Names bound by a condition (``:=``) must be new in the function. A statement may assign names that
    upstream assigns, because it computes them, but no name that upstream takes from outside the function.
    """
    conditions: set[str] = set()
    bound: set[str] = set()
    for edit in site.edits:
        if not (edit.marker or edit.fuses) and (tree := _parsed(edit.text)) is not None:
            # Names bound by comprehensions and lambdas are local to them.
            bound |= own_names(tree.body)
            conditions |= {n.target.id for n in walk_ast(tree) if isinstance(n, ast.NamedExpr)}
    taken: set[str] = set()
    for definition in plan.document.find(site.target):
        node = definition.node
        text = plan.document.source[slice(*plan.document.span(node))]
        mentioned = {name for name in bound if re.search(rf"\b{name}\b", text)}
        if mentioned and isinstance(node, FunctionNode):
            assigned = (bound - conditions) & local_names(node)
            taken |= (mentioned - assigned) & names_in(node)
    return taken


def _parsed(text: str) -> ast.Module | None:
    """The tree of an edit: statements, possibly continued by upstream's (``else:``), or an expression."""
    for form in (f"if 1:\n{text}", f"if 1:\n{text.rstrip()} pass", f"({text.strip()}\n)"):
        try:
            return ast.parse(form)
        except SyntaxError:
            continue
    return None

"""What a route depends on: the upstream code that it replaces, and the definitions which that code uses.

If another patch changes any of it, the route would not compute the same as the module, so it is dropped.
If the module itself replaces any of it later, the site is missed: it is recognised, but not the code that
runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.reasons import Code, Reason
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["covered", "relied_on", "settled"]

_NAME = re.compile(r"[^\W\d]\w*")


def covered(document: Document, site: Site) -> list[tuple[int, int]]:
    """Return the ranges of the source that a route covers.

    A replacement covers the code that it replaces. An inserted statement covers all that follows it in its
    function, because it may return. A site without edits is recognised as a whole, and routed where it is
    called: it covers its function.
    """
    function = _function(document, site.target)
    if function is None:
        return [(edit.start, edit.end) for edit in site.edits if not edit.marker]
    first, last = document.span(function)
    if not site.edits:
        return [(document.start(function), last)]
    return [
        (max(edit.start, first), edit.end if document.source[edit.start : edit.end].strip() else last)
        for edit in site.edits
        if not edit.marker
    ]


def relied_on(document: Document, site: Site) -> tuple[str, ...]:
    """Return the definitions of the module that a route relies on, sorted.

    These are the definitions that its site names, and those that the covered code uses, directly or through
    other functions of the module.
    """
    function = _function(document, site.target)
    owner = site.target.rpartition(".")[0]
    names = {
        name for edit in site.edits if not edit.marker for name in _uses(_words(edit.text), owner, document)
    }
    if function is not None:
        ranges = covered(document, site)
        inside = (node for node in walk_ast(function) if _lies_in(document, node, ranges))
        names.update(_uses(_referred(inside), owner, document))
    found: set[str] = set()
    pending = [*names, *site.relies_on]
    while pending:
        name = pending.pop()
        if name in found or name == site.target:
            continue
        found.add(name)
        body = _function(document, name)
        if body is not None:
            pending += _uses(_referred(walk_ast(body)), name.rpartition(".")[0], document)
    return tuple(sorted(found))


def _function(document: Document, target: str) -> FunctionNode | None:
    nodes = [d.node for d in document.find(target) if isinstance(d.node, FunctionNode)]
    return nodes[-1] if nodes else None


def _lies_in(document: Document, node: ast.AST, ranges: Iterable[tuple[int, int]]) -> bool:
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    start, end = document.start(node), document.end(node)
    return any(first <= start and end <= last for first, last in ranges)


def _referred(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that the nodes mention, and ``self.name`` for attributes of self."""
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            yield f"self.{node.attr}"


def _words(text: str) -> Iterator[str]:
    for found in _NAME.finditer(text):
        dotted = text[: found.start()].endswith("self.")
        yield f"self.{found.group()}" if dotted else found.group()


def _uses(names: Iterable[str], owner: str, document: Document) -> Iterator[str]:
    """Those of the names that are definitions of the module, with ``self.`` meaning the class ``owner``."""
    for name in names:
        qualname = f"{owner}.{name.removeprefix('self.')}" if name.startswith("self.") else name
        if any(definition.kind != "assignment" for definition in document.find(qualname)):
            yield qualname


def settled(view: ModuleView, sites: Iterable[Site]) -> Iterator[Site]:
    """The sites; those that rely on code that the module may replace are missed, with the line as reason."""
    for site in sites:
        reason = _reason(view, site)
        if not reason or site.status is Status.REFUSED:
            yield site
        elif site.status is Status.MISSED:
            yield replace(site, reason=Reason.joined(filter(None, (site.reason, reason))))
        else:
            yield replace(
                site, status=Status.MISSED, variant="", reason=reason, captures={}, edits=(), slots=()
            )


def _reason(view: ModuleView, site: Site) -> str:
    scope = view.scope
    owner = site.target.rpartition(".")[0]
    if site.status is Status.MISSED and owner in scope.refused:
        why = Reason(scope.refused[owner], Code.REPLACED)
        return why if why not in site.reason else ""
    for name in (site.target, *relied_on(view.document, site)) if scope.replaced else ():
        if line := scope.replaced.line(name, target=name == site.target):
            return Reason(f"{name} may be replaced at line {line}", Code.REPLACED)
    return ""

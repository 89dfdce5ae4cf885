"""The built-in config for what idioms found in one module: a route for every site with a kernel slot.

And what a route depends on: the upstream code that it replaces, and the definitions which that code uses. If
another patch changes any of it, the route would not compute the same as the module, so it is dropped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from veomni_hook.errors import IdiomError
from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.tree import own_attribute, walk_ast
from veomni_hook.patches.report import MissedSite
from veomni_hook.patches.site import Reason, Site, Status
from veomni_hook.patches.spec import ImportSpec, Patch, PatchConfig, PatchType, SlotSpec

__all__ = ["NAME", "covered", "missed", "relied_on", "routes"]

#: The name of the config that routes come from, in reports, headers and messages.
NAME = "veomni_hook.patches.idioms"
_SHOWN = 100
_NAME = re.compile(r"[^\W\d]\w*")


def routes(sites: Iterable[Site], module: str) -> PatchConfig | None:
    """Return the config that routes a module's sites to kernel slots; None if there is nothing to route.

    Args:
        sites: the sites that `recognise` found in the module.
        module: its name.

    Raises:
        IdiomError: two idioms give one slot different meanings.
    """
    routed = [site for site in sites if site.status in (Status.ROUTED, Status.REFUSED) and site.edits]
    if not routed:
        return None
    imports = dict.fromkeys(pair for site in routed for pair in site.imports)
    return PatchConfig(
        module,
        description="formulas that kernels compute, recognised by what they compute",
        patches=[
            Patch(PatchType.ROUTE, site.target, None, description=_described(site), site=site)
            for site in routed
        ],
        additional_imports=[ImportSpec(source, [name], origin=NAME) for source, name in imports],
        slots=_slots(routed, module),
        origin=NAME,
        label=NAME,
    )


def missed(sites: Iterable[Site]) -> tuple[MissedSite, ...]:
    """Return the candidates that no kernel is routed to, with the reasons."""
    left = [(site, Reason(site.reason)) for site in sites if site.status is not Status.ROUTED]
    return tuple(
        MissedSite(site.op, site.target, site.status.value, str(why), str(why.code), why.line)
        for site, why in left
    )


def _described(site: Site) -> str:
    captured = ", ".join(f"{name}={text}" for name, text in site.captures.items())
    if len(captured) > _SHOWN:
        captured = f"{captured[:_SHOWN]}..."
    return f"{site.op}/{site.variant}" + (f": {captured}" if captured else "")


def _slots(sites: Sequence[Site], module: str) -> list[SlotSpec]:
    slots: dict[str, tuple[SlotSpec, Site]] = {}
    for site in sites:
        for slot in site.slots:
            known, by = slots.setdefault(slot.name, (slot, site))
            if known != slot:
                raise IdiomError(
                    f"the slot {slot.name} is {known} for {by.op} of {by.target} "
                    f"and {slot} for {site.op} of {site.target}",
                    where=module,
                    fix="report this as a defect of veomni-hook",
                    target=site.target,
                )
    return [replace(slot, skips=_skips(name, sites)) for name, (slot, _) in slots.items()]


def _skips(name: str, sites: Sequence[Site]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The definitions that kernels of the slot ``name`` skip, by the place that asks."""
    by_place: dict[str, dict[str, None]] = {}
    for site in sites:
        if any(slot.name == name for slot in site.slots):
            for place, names in site.skips.items():
                by_place.setdefault(place, {}).update(dict.fromkeys(names))
    return tuple((place, tuple(names)) for place, names in by_place.items())


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
        mentions = (node for node in walk_ast(function) if isinstance(node, ast.Name | ast.Attribute))
        inside = (
            node
            for node in mentions
            if any(first <= document.start(node) and document.end(node) <= last for first, last in ranges)
        )
        names.update(_uses(_referred(inside), owner, document))
    definitions: set[str] = set()
    pending = [*names, *site.relies_on]
    while pending:
        name = pending.pop()
        if name in definitions or name == site.target:
            continue
        definitions.add(name)
        body = _function(document, name)
        if body is not None:
            pending += _uses(_referred(walk_ast(body)), name.rpartition(".")[0], document)
    return tuple(sorted(definitions))


def _function(document: Document, target: str) -> FunctionNode | None:
    nodes = [d.node for d in document.find(target) if isinstance(d.node, FunctionNode)]
    return nodes[-1] if nodes else None


def _referred(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that the nodes mention, and ``self.name`` for attributes of self."""
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif attribute := own_attribute(node):
            yield f"self.{attribute}"


def _words(text: str) -> Iterator[str]:
    for match in _NAME.finditer(text):
        dotted = text[: match.start()].endswith("self.")
        yield f"self.{match.group()}" if dotted else match.group()


def _uses(names: Iterable[str], owner: str, document: Document) -> Iterator[str]:
    """Those of the names that are definitions of the module, with ``self.`` meaning the class ``owner``."""
    for name in names:
        qualname = f"{owner}.{name.removeprefix('self.')}" if name.startswith("self.") else name
        if any(definition.kind != "assignment" for definition in document.find(qualname)):
            yield qualname

"""Converts a patch report and two texts to a page's data on the module."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import UNSUPPLIED
from veomni_hook.patches.render import header
from veomni_hook.patches.report import AppliedPatch, MissedSite, PatchReport
from veomni_hook.patches.routes.compose import copy_name
from veomni_hook.patches.spec import SlotSpec
from veomni_hook.tools.report.lines import split
from veomni_hook.tools.report.model import Answer, Change, Module, Place

__all__ = ["Answers", "gathered", "places_in", "unpatched"]

#: Returns what computes at a place, given the place without answers.
Answers = Callable[[Place], Sequence[Answer]]

_UPSTREAM_GONE = "the file that it was read from is gone."
_ASKED = ("kernel", "at")
_SLOT = "slot"
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def gathered(
    label: str,
    original: str | None,
    stored: str,
    report: PatchReport,
    patch_hash: str,
    answers: Answers,
    *,
    examined: bool,
) -> Module:
    """Return a page's data on a patched module.

    Args:
        label: its short name.
        original: upstream's text; None: the file that it was read from is gone.
        stored: the stored file's text.
        report: what was applied, with the stored file's lines.
        patch_hash: names the patched form.
        answers: returns what computes at a place.
        examined: whether idioms ran, so that the report contains candidates that are not routed.
    """
    header_lines = len(header(report, patch_hash))
    line_of = {patch.target: patch.lines[0] for patch in report.applied if patch.kind == _SLOT}
    known = [replace(place, answers=tuple(answers(place))) for place in places_in(stored, report.slots)]
    unsupplied = (
        MissedSite(place.op, place.target, "no kernel", UNSUPPLIED)
        for place in known
        if place.formula and not registry.supplied(place.op, place.variant)
    )
    return Module(
        name=report.module,
        label=label,
        version=f"{report.distribution} {report.version}",
        patch_hash=patch_hash,
        original=original,
        patched="".join(f"{line}\n" for line in split(stored)[header_lines:]),
        first=header_lines + 1,
        changes=tuple(_changes(report.applied, known)),
        slots=tuple(
            (slot.name, f"{slot.op}/{slot.variant}", line_of.get(slot.name, 0)) for slot in report.slots
        ),
        yielded=report.yielded,
        unrouted=(*report.missed, *unsupplied) if examined else None,
        reason="" if original is not None else _UPSTREAM_GONE,
    )


def unpatched(
    name: str, label: str, version: str, reason: str, *, unrouted: Iterable[MissedSite] | None = None
) -> Module:
    """Return a page's data on a module that no patch applies to; ``reason`` is a sentence."""
    missed = None if unrouted is None else tuple(unrouted)
    return Module(name, label, version, "", None, None, 1, (), (), (), missed, reason)


def places_in(text: str, slots: Sequence[SlotSpec]) -> list[Place]:
    """Return every place in a patched module's text that asks one of the slots, in line order.

    Places in the copy of a method belong to the method.
    """
    named = {slot.name: slot for slot in slots}
    places = []
    tree = ast.parse(text)
    methods = (
        f"{owner.name}.{one.name}"
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
        for one in owner.body
        if isinstance(one, ast.FunctionDef)
    )
    copied = {copy_name(method): method for method in methods}
    for owner, node in _calls(tree, ""):
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _ASKED:
            continue
        receiver = node.func.value
        if isinstance(receiver, ast.Name) and receiver.id in named:
            slot = named[receiver.id]
            variant = registry.variant(slot.op, slot.variant) if slot.op in registry.names() else None
            formula = variant.formula if variant is not None else ""
            places.append(
                Place(node.lineno, copied.get(owner, owner), slot.name, slot.op, slot.variant, formula)
            )
    return sorted(places, key=lambda place: place.line)


def _calls(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the qualified name of the definition that contains it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield owner, child
        inside = f"{owner}.{child.name}".lstrip(".") if isinstance(child, _DEFINITIONS) else owner
        yield from _calls(child, inside)


def _changes(applied: Sequence[AppliedPatch], places: Sequence[Place]) -> Iterator[Change]:
    """The patches by line, without slots; each with the places in its lines (of its op, if it has one).

    A method and its copy may both ask a slot: that is one place.
    """
    shown = sorted((patch for patch in applied if patch.kind != _SLOT), key=lambda patch: patch.lines)
    places_of: dict[int, list[Place]] = {}
    for place in places:
        around = [at for at, patch in enumerate(shown) if patch.lines[0] <= place.line <= patch.lines[1]]
        own = [
            at for at in around if shown[at].op == place.op and place.variant in shown[at].variant.split("|")
        ]
        best = min(own or around, key=lambda at: shown[at].lines[1] - shown[at].lines[0], default=None)
        if best is not None:
            places_of.setdefault(best, []).append(place)
    for at, patch in enumerate(shown):
        asked = tuple({(place.target, place.slot): place for place in places_of.get(at, ())}.values())
        yield Change(patch.kind, patch.target, patch.reason, patch.config, patch.lines, patch.declared, asked)

"""Checks after splicing: the result is valid, nothing else changed, no name is missing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from veomni_hook.errors import (
    ExcludedNameError,
    IdiomError,
    PatchConflictError,
    PatchError,
    PatchTargetError,
    UnresolvedNameError,
)
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, Placed
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.scope import (
    Use,
    bound_names,
    global_bindings,
    global_uses,
    has_star_import,
    provided_names,
    unresolved_names,
    unresolved_uses,
)
from veomni_hook.patches.plan import Plan, Step
from veomni_hook.patches.routes.config import NAME as ROUTES
from veomni_hook.patches.spec import Patch, PatchType, PositionedHelper

__all__ = ["check_names", "check_overlaps", "check_provided", "check_text", "remedy", "untouched"]


def check_overlaps(plan: Plan, edits: Sequence[Edit]) -> None:
    """Check that no two edits touch the same code.

    Raises:
        IdiomError: two routes touch the same code.
        PatchConflictError: two patches touch the same code.
    """
    last: Edit | None = None
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.start != edit.end)):
        if last is not None and edit.start < last.end:
            one, other = (plan.steps[max(e.patch, 0)] for e in (last, edit))
            line = plan.document.lineno(edit.start)
            routes = one.kind == other.kind == PatchType.ROUTE
            raise (IdiomError if routes else PatchConflictError)(
                f"{one} and {other} change the same code",
                where=f"{plan.tasks[max(edit.patch, 0)].where}; line {line}",
                fix="report this as a defect of veomni-hook" if routes else "change it in one patch",
                target=other.target,
            )
        if last is None or edit.end > last.end:
            last = edit


def check_text(plan: Plan, text: str, placed: Sequence[Placed]) -> Document:
    """Parse and compile the result.

    Raises:
        PatchError: it is not valid Python; the message names the patch that contains the error.
    """
    try:
        patched = Document(text, plan.origin.module)
        compile(patched.tree, plan.origin.module, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 0
        lines = text.split("\n")
        guilty = [
            plan.steps[one.edit.patch]
            for one in placed
            if one.edit.patch >= 0
            and text.count("\n", 0, one.start) < line <= text.count("\n", 0, one.end) + 1
        ]
        shown = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        texts = listed(
            f"{step.target} ({', '.join(dict.fromkeys((step.config.name, step.config.origin)))})"
            for step in guilty
        )
        raise PatchError(
            f"the patched source is not valid Python: {error} ({shown})",
            where=f"{plan.origin}; in the text of {texts}",
            fix="correct the code of that patch",
            target=guilty[0].target if guilty else "",
        ) from error
    return patched


def untouched(plan: Plan, placed: Sequence[Placed], patched: Document) -> tuple[str, ...]:
    """Names of the top-level definitions that no edit touches; checks that their text is unchanged.

    Raises:
        PatchError: one of them is no longer a separate definition.
    """
    document = plan.document
    spans = {patched.span(node): patched.source[slice(*patched.span(node))] for node in patched.tree.body}
    names: dict[str, bool] = {}
    for definition in document.definitions():
        if len(definition.parents) != 1:
            continue
        start, end = document.span(definition.node)
        if any(one.edit.start < end and one.edit.end > start for one in placed):
            names[definition.qualname] = False
            continue
        shift = sum(
            len(one.edit.text) - one.edit.end + one.edit.start for one in placed if one.edit.end <= start
        )
        if spans.get((start + shift, end + shift)) != document.source[start:end]:
            above = [len(one.edit.text) for one in placed if one.edit.start == one.edit.end == start]
            last = document.full_end(definition.node)
            if any((start + shift - length, end + shift) in spans for length in above) or any(
                end <= one.edit.start <= last for one in placed
            ):
                names[definition.qualname] = False  # a decorator was added, or something at its end
                continue
            raise PatchError(
                f"{definition.qualname} changed, though no patch names it",
                where=f"{plan.origin}; line {document.lineno(start)}",
                fix="look for a patch whose code ends in an open bracket or string",
                target=definition.qualname,
            )
        names.setdefault(definition.qualname, True)
    return tuple(name for name, same in names.items() if same)


def check_names(plan: Plan, placed: Sequence[Placed], patched: Document) -> None:
    """Check that no code uses a dropped or excluded name that nothing else provides.

    Raises:
        ExcludedNameError: an excluded name is still used.
        PatchTargetError: a dropped import is still used.
    """
    kept = global_bindings(patched.tree) if plan.gone else {}
    gone = {name: task for name, task in plan.gone.items() if name not in kept}
    if not gone or has_star_import(patched.tree):
        return
    uses = global_uses(patched.tree, gone)
    for name, task in gone.items():
        places = [_place(plan, use, placed, patched) for use in uses if use.name == name]
        if not places:
            continue
        where = f"{task.where}; used in {'; '.join(places)}"
        if task.kind == "exclude":
            raise ExcludedNameError(
                f"{name} is excluded from the output but still used {len(places)} times",
                where=where,
                fix=f"exclude or override what uses it, or keep {name}",
                target=name,
                uses=places,
            )
        raise PatchTargetError(
            f"the import of {name} is dropped but {name} is still used {len(places)} times",
            where=where,
            fix=f"provide {name} by add_import, add_post_import_block or add_helper, or do not drop it",
            target=name,
        )


def check_provided(plan: Plan, placed: Sequence[Placed], patched: Document) -> None:
    """Check that the configs' code reads no undefined global name; upstream code is not checked.

    Raises:
        IdiomError: the code of a route does.
        UnresolvedNameError: the code of a config does; the message says what to write for each name.
    """
    if all(step.config.name == ROUTES for step in plan.steps):
        return  # generated by this package for every release; checking costs a tenth of the module's time
    missing = unresolved_names(patched.source, patched.tree)
    if missing:
        missing -= unresolved_names(plan.document.source, plan.document.tree)
    if not missing:
        return
    uses = {use.name: use for use in reversed(unresolved_uses(patched.tree, missing))}
    bound = provided_names(patched.source, patched.tree)
    places, remedies, first = [], [], len(plan.steps)
    for name in sorted(missing):
        use = uses.get(name)
        index = -1 if use is None else _step_at(placed, patched.start(use.node))
        first = min(first, index if index >= 0 else first)
        places.append(f"{name} in {'a patch' if use is None else _place(plan, use, placed, patched)}")
        step = plan.steps[index] if index >= 0 else None
        # Names bound in any scope of the top-level statement that holds the use: a local name may be meant.
        lineno = use.node.lineno if use is not None else 0
        holders = [n for n in patched.tree.body if n.lineno <= lineno <= (n.end_lineno or n.lineno)]
        remedies.append(remedy(name, step, bound | bound_names(holders)))
    first = first if first < len(plan.steps) else 0
    what = f"a patch uses {listed(sorted(missing))}, which neither the module nor the patch provides"
    where = f"{plan.tasks[first].where}; {'; '.join(places)}"
    if plan.steps[first].kind == PatchType.ROUTE:
        raise IdiomError(what, where=where, fix="report this as a defect of veomni-hook")
    raise UnresolvedNameError(
        what, where=where, fix="; ".join(remedies), target=plan.steps[first].target, names=sorted(missing)
    )


def _place(plan: Plan, use: Use, placed: Sequence[Placed], patched: Document) -> str:
    """Where a use is: a line of the upstream file, or a patch's code."""
    position = patched.start(use.node)
    index = _step_at(placed, position)
    if index >= 0:
        step = plan.steps[index]
        return f"the code for {step.target} ({step.config.name})"
    shift = sum(len(one.edit.text) - one.edit.end + one.edit.start for one in placed if one.end <= position)
    line = plan.document.lineno(position - shift)
    holder = next(
        (
            definition.qualname
            for definition in reversed(plan.document.definitions())
            if definition.kind != "assignment"
            and plan.document.start(definition.node) <= position - shift < plan.document.end(definition.node)
        ),
        "module level",
    )
    return f"line {line} ({holder})"


def _step_at(placed: Sequence[Placed], position: int) -> int:
    """The index of the step whose text is at an offset of the result; -1 for upstream text."""
    spots = (one.edit.patch for one in placed if one.start <= position < one.end)
    return next((index for index in spots if index >= 0), -1)


_ANY = "provide it by add_helper, add_import or add_post_import_block"


def remedy(name: str, step: Step | None, existing: Collection[str]) -> str:
    """What to write for a name that the code of ``step`` uses.

    Args:
        name: the missing name.
        step: the step whose code uses it; None if unknown.
        existing: the names that this code could have meant.
    """
    namespace = {} if step is None else _namespace(step)
    if name in namespace:
        return f"{name}: {_as_added(name, namespace[name], namespace.get('__name__'))}"
    close = nearest(name, existing)
    return f"{name}: " + (f"write {listed(close)}, or {_ANY}" if close else _ANY)


def _namespace(step: Step) -> Mapping[str, Any]:
    """The globals of the module in which the step's code was written; empty if unknown."""
    payload = step.payload.replacement if isinstance(step.payload, Patch) else step.payload
    written = payload.helper if isinstance(payload, PositionedHelper) else payload
    if callable(written):
        written = inspect.unwrap(written)
    namespace = getattr(written, "__globals__", None)
    if isinstance(namespace, dict):
        return namespace
    module = sys.modules.get(getattr(written, "__module__", None) or "")
    return {} if module is None else vars(module)


def _as_added(name: str, value: object, written_in: str | None) -> str:
    if isinstance(value, ModuleType):
        alias = "" if value.__name__ == name else f", alias={name!r}"
        return f"config.add_import({value.__name__!r}{alias}, is_from_import=False)"
    home, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not (isinstance(home, str) and isinstance(own, str) and own.isidentifier()):
        return f"config.add_post_import_block(...) with the assignment of {name}"
    if home == written_in:
        return f"config.add_helper({name})"
    return f"config.add_import({home!r}, names=[{own if own == name else f'{own} as {name}'!r}])"

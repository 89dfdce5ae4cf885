"""What configs add around upstream's definitions: imports, blocks, kernel slots, helpers.

Imports, slots, blocks and helpers follow upstream's imports in that order; a positioned helper follows its
target. If several configs add the same thing (an inherited helper), it is added once.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterable
from dataclasses import replace

from veomni_hook.errors import PatchConflictError, PatchTargetError
from veomni_hook.patches.code.edit import reindent
from veomni_hook.patches.code.imports import import_anchor
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.snippet import Snippet
from veomni_hook.patches.code.wrap import wrapped
from veomni_hook.patches.plan import Plan
from veomni_hook.patches.spec import ImportSpec, PatchType, PositionedHelper, SlotSpec
from veomni_hook.patches.verbs.snippets import block_text, imported_module, snippet_of
from veomni_hook.patches.verbs.targets import top_level

__all__ = ["append_after_imports", "plan_additions"]

_DEFINITIONS = ("class", "function", "assignment")
_SLOT_IMPORT = "from veomni_hook.kernels.slot import Slot as VeomniSlot"


def plan_additions(plan: Plan) -> None:
    """Plan imports, slots, blocks and helpers.

    Raises:
        PatchTargetError: the target of a positioned helper is missing.
        PatchConflictError: a helper or slot has the same name as something else in the module.
        ReplacementError: a helper's source cannot be read.
    """
    _plan_imports(plan)
    _plan_slots(plan)
    for index, step in plan.of_kind("post_import_block"):
        text = block_text(plan, index, textwrap.dedent(step.payload).strip("\n").rstrip())
        append_after_imports(plan, index, text, plan.marker(index, "ADDED BLOCK", "after the imports"), gap=1)
    for index, step in plan.of_kind("helper"):
        if isinstance(step.payload, PositionedHelper):
            _plan_positioned(plan, index, step.payload)
        else:
            snippet = _read(plan, index, step.payload)
            text = f"{snippet.comments}\n{snippet.document.source}".removeprefix("\n")
            append_after_imports(plan, index, text, plan.marker(index, "HELPER"), gap=2)


def import_text(spec: ImportSpec) -> str:
    """The statement of an added import."""
    if not spec.is_from_import:
        return f"import {spec.module}" + (f" as {spec.alias}" if spec.alias else "")
    names = list(spec.names or ["*"])
    if spec.alias and len(names) == 1 and names != ["*"]:
        names = [f"{names[0]} as {spec.alias}"]
    line = f"from {spec.module} import {', '.join(names)}"
    if len(line) <= 110:
        return line
    return f"from {spec.module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _plan_imports(plan: Plan) -> None:
    previous = None
    for index, step in plan.of_kind(PatchType.ADDITIONAL_IMPORT.value):
        text = import_text(replace(step.payload, module=imported_module(plan, index, step.payload.module)))
        if step.payload.module == "__future__":
            _insert(plan, index, import_anchor(plan.document, future=True), text, "", gap=0)
            continue
        marker = "" if step.config is previous else plan.marker(index, "ADDED IMPORTS", "for the patches")
        append_after_imports(plan, index, text, marker, gap=0 if previous else 1)
        previous = step.config


def _plan_slots(plan: Plan) -> None:
    first = True
    for index, step in plan.of_kind("slot"):
        slot: SlotSpec = step.payload
        _refuse_taken(plan, index, slot.name, "slot")
        if first:
            append_after_imports(plan, index, _SLOT_IMPORT, "", gap=1)
        line = _slot_text(slot)
        marker = plan.marker(index, "KERNEL SLOTS", "asked by guards") if first else ""
        append_after_imports(plan, index, wrapped(line), marker, gap=1 if first else 0)
        first = False


def _slot_text(slot: SlotSpec) -> str:
    """The assignment that creates a slot."""
    given = ", ".join((json.dumps(slot.op), json.dumps(slot.variant), "__name__"))
    keywords = [f"parameters={json.dumps(slot.parameters)}"] if slot.parameters else []
    if slot.skips:
        keywords.append(f"skips={json.dumps(dict(slot.skips))}")
    return f"{slot.name} = VeomniSlot({', '.join([given, *keywords])})"


def _plan_positioned(plan: Plan, index: int, helper: PositionedHelper) -> None:
    document = plan.document
    found = top_level(document, helper.target, _DEFINITIONS)
    if helper.placement != "after":
        raise PatchTargetError(
            f"a helper can only be placed after its target, not {helper.placement!r}",
            where=plan.where(index),
            fix='use placement="after"',
            target=helper.target,
        )
    if not found:
        names = [d.qualname for d in document.definitions() if len(d.parents) == 1]
        close = nearest(helper.target, names)
        raise PatchTargetError(
            f"there is no top-level definition {helper.target} to put a helper after",
            where=plan.where(index),
            fix=f"correct the target; nearest: {listed(close)}",
            target=helper.target,
            nearest=close,
        )
    snippet = _read(plan, index, helper.helper)
    node = found[-1].node
    indent = document.indent(node)
    text = f"{snippet.comments}\n{snippet.document.source}".removeprefix("\n")
    marker = plan.marker(index, "HELPER", f"{snippet.node.name} (after {helper.target})")
    offset = document.full_end(node)
    gap = 1 if indent else 2
    plan.insert(index, offset, "\n" * gap)
    plan.mark(index, offset, f"\n{indent}{marker}")
    plan.insert(index, offset, "\n" + reindent(text, "", indent))


def _read(plan: Plan, index: int, helper: object) -> Snippet:
    snippet = snippet_of(plan, index, helper)
    _refuse_taken(plan, index, snippet.node.name, "helper")
    return snippet


def _refuse_taken(plan: Plan, index: int, name: str, what: str) -> None:
    """Raise if an upstream definition further down would silently rebind the name."""
    excluded = {step.target for _, step in plan.of_kind("exclude")}
    taken = [d for d in top_level(plan.document, name, _DEFINITIONS) if d.qualname not in excluded]
    if taken:
        line = plan.document.lineno(plan.document.start(taken[0].node))
        raise PatchConflictError(
            f"the {what} {name} has the name of something that the module defines (line {line})",
            where=plan.where(index),
            fix=f"rename the {what}, or use replace_class / replace_function to replace upstream's {name}",
            target=name,
        )


def append_after_imports(plan: Plan, index: int, text: str, marker: str, *, gap: int) -> None:
    """Plan to add ``text`` after upstream's imports and ``gap`` empty lines, under the comment ``marker``."""
    _insert(plan, index, import_anchor(plan.document), text, marker, gap=gap)


def _insert(plan: Plan, index: int, anchor: int, text: str, marker: str, *, gap: int) -> None:
    """Insert whole lines after the line that ends at ``anchor``, or before the first line."""
    if anchor >= 0:
        plan.insert(index, anchor, "\n" * gap)
        if marker:
            plan.mark(index, anchor, f"\n{marker}")
        plan.insert(index, anchor, f"\n{text}")
        return
    offset = _first_line(plan)
    if marker:
        plan.mark(index, offset, f"{marker}\n")
    plan.insert(index, offset, f"{text}\n" + "\n" * gap)


def _first_line(plan: Plan) -> int:
    """Where a module without imports and docstring begins: after the comments at its top."""
    document = plan.document
    body: Iterable[ast.stmt] = document.tree.body
    for statement in body:
        return document.line_start(document.span(statement)[0])
    return len(document.source)

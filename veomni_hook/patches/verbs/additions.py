"""What configs add around upstream's definitions: imports, blocks, kernel slots, helpers.

Imports, slots, blocks and helpers follow upstream's imports in that order; a positioned helper follows its
target. If several configs add the same thing (an inherited helper), it is added once.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace

from veomni_hook.errors import PatchConflictError, PatchTargetError
from veomni_hook.patches.code.imports import import_anchor
from veomni_hook.patches.code.wrap import wrapped
from veomni_hook.patches.plan import Plan, Task
from veomni_hook.patches.spec import ImportSpec, PatchType, PositionedHelper, SlotSpec
from veomni_hook.patches.verbs.snippets import block_text, imported_module, snippet_of, with_comments
from veomni_hook.patches.verbs.targets import top_level

__all__ = ["append_after_imports", "plan_additions"]

_SLOT_IMPORT = "from veomni_hook.kernels.slot import Slot as VeomniSlot"


def plan_additions(plan: Plan) -> None:
    """Plan imports, slots, blocks and helpers.

    Raises:
        PatchTargetError: the target of a positioned helper is missing.
        PatchConflictError: a helper or slot has the same name as something else in the module.
        ReplacementError: a helper's source cannot be read.
    """
    previous = None
    for task in plan.of_kind(PatchType.ADDITIONAL_IMPORT):
        spec, config = task.step.payload, task.step.config
        text = _import_text(replace(spec, module=imported_module(task, spec.module)))
        if spec.module == "__future__":
            append_after_imports(task, text, gap=0, future=True)
            continue
        marker = "" if config is previous else task.marker("ADDED IMPORTS", "for the patches")
        append_after_imports(task, text, marker, gap=0 if previous else 1)
        previous = config
    for number, task in enumerate(plan.of_kind("slot")):
        slot: SlotSpec = task.step.payload
        _refuse_taken(task, slot.name, "slot")
        if not number:
            append_after_imports(task, _SLOT_IMPORT, gap=1)
        arguments = [json.dumps(slot.op), json.dumps(slot.variant), "__name__"]
        arguments += [f"parameters={json.dumps(slot.parameters)}"] if slot.parameters else []
        arguments += [f"skips={json.dumps(dict(slot.skips))}"] if slot.skips else []
        text = wrapped(f"{slot.name} = VeomniSlot({', '.join(arguments)})")
        marker = "" if number else task.marker("KERNEL SLOTS", "asked by guards")
        append_after_imports(task, text, marker, gap=0 if number else 1)
    for task in plan.of_kind("post_import_block"):
        text = block_text(task, textwrap.dedent(task.step.payload).strip("\n").rstrip())
        append_after_imports(task, text, task.marker("ADDED BLOCK", "after the imports"), gap=1)
    for task in plan.of_kind("helper"):
        if isinstance(task.step.payload, PositionedHelper):
            _plan_positioned(task, task.step.payload)
        else:
            _, text = _read(task, task.step.payload)
            append_after_imports(task, text, task.marker("HELPER"), gap=2)


def _import_text(spec: ImportSpec) -> str:
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


def _plan_positioned(task: Task, helper: PositionedHelper) -> None:
    document = task.document
    definitions = top_level(document, helper.target)
    if helper.placement != "after":
        raise task.error(
            PatchTargetError,
            f"a helper can only be placed after its target, not {helper.placement!r}",
            'use placement="after"',
            target=helper.target,
        )
    if not definitions:
        raise task.missing(
            f"there is no top-level definition {helper.target} to put a helper after",
            "correct the target; nearest",
            helper.target,
            [d.qualname for d in document.definitions() if len(d.parents) == 1],
            target=helper.target,
        )
    name, text = _read(task, helper.helper)
    node = definitions[-1].node
    indent = document.indent(node)
    marker = task.marker("HELPER", f"{name} (after {helper.target})")
    task.append(document.full_end(node), text, marker, indent=indent, gap=1 if indent else 2)


def _read(task: Task, helper: object) -> tuple[str, str]:
    """Name and text of a helper."""
    snippet = snippet_of(task, helper)
    _refuse_taken(task, snippet.node.name, "helper")
    return snippet.node.name, with_comments(snippet, snippet.document.source)


def _refuse_taken(task: Task, name: str, what: str) -> None:
    """Raise if an upstream definition further down would silently rebind the name."""
    excluded = {other.target for other in task.plan.of_kind("exclude")}
    taken = [d for d in top_level(task.document, name) if d.qualname not in excluded]
    if taken:
        line = task.document.lineno(task.document.start(taken[0].node))
        raise task.error(
            PatchConflictError,
            f"the {what} {name} has the name of something that the module defines (line {line})",
            f"rename the {what}, or use replace_class / replace_function to replace upstream's {name}",
            target=name,
        )


def append_after_imports(task: Task, text: str, marker: str = "", *, gap: int, future: bool = False) -> None:
    """Plan to add ``text`` after upstream's imports and ``gap`` empty lines, under the comment ``marker``.

    With ``future``, only after those from ``__future__``.
    """
    anchor = import_anchor(task.document, future=future)
    if anchor >= 0:
        task.append(anchor, text, marker, gap=gap)
        return
    # A module without imports and docstring begins after the comments at its top.
    document = task.document
    first = document.tree.body[:1]
    offset = document.line_start(document.span(first[0])[0]) if first else len(document.source)
    if marker:
        task.mark(offset, f"{marker}\n")
    task.insert(offset, f"{text}\n" + "\n" * gap)

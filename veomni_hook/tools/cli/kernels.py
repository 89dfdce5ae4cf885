"""What `veomni-hook explain` shows of ops: their kernels, and which one each formula gets, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.declaration import Op
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.system import System
from veomni_hook.patches.code.nearest_names import is_near_miss
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.targets import families
from veomni_hook.tools.cli.sites.kernel import Asked, asked
from veomni_hook.tools.cli.usage import UsageError

HEADERS = ("op", "variant", "backend", "chosen", "reason", "description")


def tell(op: str | None, choice: Choice, place: System, *, as_json: bool) -> None:
    """Print the kernels of one op; None: of all, with the meaning of each preset."""
    ops = registry.ops()
    rows = [
        row
        for one in ([ops[op]] if op else ops.values())
        for variant in one.variants
        for row in _rows(one, variant, asked(one.name, variant, choice, place))
    ]
    presets = {} if op else {name: registry.preset(name) for name in registry.backends()[2:]}
    if as_json:
        output.emit_json({"system": str(place), "choice": str(choice), "presets": presets, "kernels": rows})
    else:
        show(rows, presets, f"{place}; kernels = {choice}")


def show(rows: Sequence[Mapping[str, Any]], presets: Mapping[str, Sequence[str]], heading: str) -> None:
    """Print the kernels with the decisions about them, and the meaning of each preset."""
    output.emit_heading(heading)
    output.emit_table(HEADERS, [[row[header] for header in HEADERS] for row in rows])
    if presets:
        output.emit_heading("\npresets: the ops that get a backend which is chosen for all ops")
        output.emit_fields({name: ", ".join(ops) for name, ops in presets.items()})


def is_op(name: str) -> bool:
    """Whether a target is an op.

    Raises:
        UsageError: it is nearly an op's name, and no family's.
    """
    ops = registry.ops()
    near = [op for op in ops if is_near_miss(name, op)]
    if name not in ops and near and name not in families():
        fix = f"nearest ops: {', '.join(near)}"
        raise UsageError(f"there is no op {name!r}", where="veomni-hook explain", fix=fix)
    return name in ops


def _rows(op: Op, variant: str, answer: Asked) -> list[dict[str, Any]]:
    """A row for each backend of a variant, and one for the upstream code."""
    kernels = {kernel.backend: kernel for kernel in registry.kernels(op.name, variant)}
    rows = []
    for decision in answer.decisions:
        kernel = kernels.get(decision.backend)
        rows.append(
            {
                "op": op.name,
                "variant": variant,
                "formula": op.variants[variant].formula,
                "backend": decision.backend,
                "chosen": decision.backend == answer.backend,
                "accepted": decision.accepted,
                "reason": decision.reason,
                "load": kernel.load if kernel else None,
                "description": kernel.description if kernel else "the upstream code",
            }
        )
    return rows

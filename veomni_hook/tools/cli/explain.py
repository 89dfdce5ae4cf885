"""`veomni-hook explain`: what was patched in a module, and why; or which kernel each formula of ops gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.declaration import Op
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.system import System
from veomni_hook.patches.code.nearest_names import is_near_miss
from veomni_hook.releases import installed
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    OutputOption,
    SystemOption,
    device_on,
    facts_of,
    prepared,
)
from veomni_hook.tools.cli.inputs.targets import complete_family, families
from veomni_hook.tools.cli.sites.kernel import Asked, asked, chosen, machine
from veomni_hook.tools.cli.usage import UsageError
from veomni_hook.tools.facts import Facts

OP_HEADERS = ("op", "variant", "backend", "chosen", "reason", "description")

if TYPE_CHECKING:
    from veomni_hook.finders.prepare import Prepared


def complete_target(incomplete: str) -> list[str]:
    """Complete a family, a module or an op for the shell."""
    return complete_family(incomplete) + [op for op in registry.ops() if op.startswith(incomplete)]


def explain(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A family (qwen3), a module, a class, a model's id (Qwen/Qwen3-0.6B) or its folder; or an op"
            " (rms_norm). Default: all ops.",
            autocompletion=complete_target,
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    system: SystemOption = None,
    file: OutputOption = None,
    *,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Do not say which kernel each slot gets: to find that out, a torch for GPUs is imported.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain what was patched in a module, where and why, and which kernels run; or the kernels of an op.

    A slot is a place in the patched code that asks for a kernel. A patch "yields" when a config of yours
    patches the same code. Line numbers are those of the stored file, which tracebacks and `dump` show.

    Of an op, or of all without TARGET: every kernel, and which one each formula gets on this machine with the
    present settings, and why. What depends on a call (dtype, shapes, hooks) is decided at that call:
    `veomni_hook.explain(model)` shows it.
    """
    choice = chosen()  # before torch is imported, to report an invalid choice at once
    if config is None and (target is None or is_op(target)):
        if device or fast:
            fix = "name a family (qwen3); --system chooses another machine"
            raise UsageError("--device and --fast are about a module", where="veomni-hook explain", fix=fix)
        tell_ops(target, choice, machine(system), as_json=as_json)
        return
    module = prepared(target, config, device or device_on(system))
    facts = explained(module, None if fast else lambda: machine(system))
    if as_json:
        output.emit_json(facts)
    else:
        show(facts, _place(module))


def show(facts: Facts, place: str) -> None:
    """Print what `explained` returns, and where the patched source is."""
    from veomni_hook.patches.reasons import remedies
    from veomni_hook.tools.coverage import NO_KERNEL, ROUTED

    output.emit_heading(f"{facts['module']} ({facts['distribution']} {facts['version']})")
    output.emit_fields({"source": facts["source"], "patched": place, "hash": facts["patch_hash"] or None})
    patches = [patch for patch in facts["applied"] if patch["kind"] != "slot"]
    _section("applied", ("lines", "kind", "target", "reason", "config"), patches)
    _section(
        "replaced by transformers' class mapping",
        ("class", "registered", "replacement"),
        facts["class_mapping"],
    )
    _section("yielded", ("kind", "target", "reason", "config"), facts["yielded"])
    _section("not routed", ("status", "op", "target", "code", "reason"), facts["missed"])
    known = remedies(site["code"] for site in facts["missed"])
    told = [{"code": code, "remedy": remedy} for code, remedy in known]
    _section("what can be done about a code", ("code", "remedy"), told)
    columns = ("name", "op", "variant", "kernel", "decisions")
    for title, status in (("kernel slots", ROUTED), ("slots without a kernel on any machine", NO_KERNEL)):
        _section(title, columns, [slot for slot in facts["slots"] if slot["status"] == status])
    output.emit_heading("\nleft as installed")
    output.emit_text(f"  {', '.join(facts['untouched']) or 'nothing'}\n")


def explained(module: Prepared, place: Callable[[], System] | None = None) -> Facts:
    """Return everything that `explain` shows about a module as JSON-ready values.

    Args:
        module: the module, patched.
        place: finds the system for which the kernel of each slot is selected; None: none is.
    """
    from veomni_hook.settings import resolve
    from veomni_hook.tools.cli.sites.table import supply
    from veomni_hook.tools.coverage import missed
    from veomni_hook.tools.report.class_mapping import registered_for

    facts = facts_of(module)
    replaced = registered_for(_definitions(module))
    facts["class_mapping"] = [
        {"class": name, "registered": by, "replacement": new} for name, by, new in replaced
    ]
    if module.report is None:
        distribution = module.module.partition(".")[0]
        sites = missed(module.module, module.original) if resolve().settings.idioms else ()
        facts.update(
            distribution=distribution,
            version=installed(distribution) or "of unknown version",
            untouched=_definitions(module),
        )
        return {**facts, "applied": [], "yielded": [], "slots": [], "missed": [asdict(one) for one in sites]}
    facts.update(module.report.to_dict())
    for slot in facts["slots"]:
        slot["status"], _ = supply(slot["op"], slot["variant"])
    if place is not None and facts["slots"]:
        system, choice = place(), chosen()
        for slot in facts["slots"]:
            answer = asked(slot["op"], slot["variant"], choice, system)
            slot["kernel"] = answer.backend
            slot["decisions"] = [f"{one.backend}: {one.reason}" for one in answer.decisions]
    return facts


def _definitions(module: Prepared) -> list[str]:
    import ast

    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in ast.parse(module.original).body if isinstance(node, defined)]


def _place(module: Prepared) -> str:
    if module.patched is None:
        return f"no: {module.reason}"
    if module.stored_path is not None:
        return f"{module.stored_path} (cache {module.cache})"
    return f"in memory only: {module.reason}" if module.reason else "in memory only"


def _section(title: str, columns: tuple[str, ...], rows: list[Facts]) -> None:
    if not rows:
        return
    output.emit_heading(f"\n{title}")
    shown = [column for column in columns if any(column in row for row in rows)]
    output.emit_table(shown, [[_cell(row, column) for column in shown] for row in rows])


def _cell(row: Facts, column: str) -> object:
    if column == "lines":
        return "-".join(map(str, row[column]))
    return "; ".join(row[column]) if column == "decisions" else row.get(column)


def tell_ops(op: str | None, choice: Choice, place: System, *, as_json: bool) -> None:
    """Print the kernels of one op; None: of all, with the meaning of each preset."""
    ops = registry.ops()
    rows = [
        row
        for one in ([ops[op]] if op else ops.values())
        for variant in one.variants
        for row in _op_rows(one, variant, asked(one.name, variant, choice, place))
    ]
    presets = {} if op else {name: registry.preset(name) for name in registry.backends()[2:]}
    if as_json:
        output.emit_json({"system": str(place), "choice": str(choice), "presets": presets, "kernels": rows})
    else:
        show_ops(rows, presets, f"{place}; kernels = {choice}")


def show_ops(rows: Sequence[Facts], presets: Mapping[str, Sequence[str]], heading: str) -> None:
    """Print the kernels with the decisions about them, and the meaning of each preset."""
    output.emit_heading(heading)
    output.emit_table(OP_HEADERS, [[row[header] for header in OP_HEADERS] for row in rows])
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


def _op_rows(op: Op, variant: str, answer: Asked) -> list[Facts]:
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

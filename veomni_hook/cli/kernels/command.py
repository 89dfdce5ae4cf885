"""`veomni-hook kernels`: list all kernels, and which one each op or place in a model gets, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_hook.cli import output
from veomni_hook.cli.inputs.options import (
    JobsOption,
    JsonOption,
    SourceOption,
    SystemOption,
    TypeOption,
    families_argument,
)
from veomni_hook.cli.usage import FOUND, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veomni_hook.cli.sites.kernel import Asked
    from veomni_hook.cli.sites.table import Table
    from veomni_hook.kernels.selection.choice import Choice
    from veomni_hook.kernels.selection.declaration import Op
    from veomni_hook.kernels.selection.system import System

HEADERS = ("op", "variant", "backend", "chosen", "reason", "description")


def kernels(
    families: Annotated[
        list[str] | None,
        families_argument(
            "Show the kernels of these ops, or which kernel each routed place of these families, modules or"
            " Python files gets."
        ),
    ] = None,
    device: TypeOption = None,
    system: SystemOption = None,
    source: SourceOption = None,
    jobs: JobsOption = None,
    *,
    models: Annotated[
        bool,
        typer.Option(
            "--models",
            help="Count the places of each family by kernel. Without FAMILY: of all families, which can take"
            " a minute.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List every kernel, and which one each op gets on this machine with the present settings, and why.

    With FAMILY or --models: which kernel each routed place of models gets. No model code is imported. Exits
    with 1 if a module, or an idiom (the recogniser of one operation by the structure of its code), fails.

    What depends on a call (dtype, shapes, hooks) is decided at that call: `veomni_hook.explain(model)` shows
    it.
    """
    from veomni_hook.cli.sites.kernel import asked, chosen, machine
    from veomni_hook.cli.sites.table import site_table
    from veomni_hook.kernels.selection.registry import registry

    choice = chosen()  # before torch is imported, to report an invalid choice at once
    place = machine(device, system)
    ops = _ops_meant(families or ())
    if models or (families and not ops):
        table = site_table(families or (), source, jobs)
        _tell_models(table, choice, place, models=models, as_json=as_json)
        return
    if source is not None or jobs is not None:
        raise UsageError(
            "--source and --jobs need families",
            where="veomni-hook kernels",
            fix="name families, or add --models",
        )
    rows = [
        row
        for op in ops or registry.ops().values()
        for variant in op.variants
        for row in _rows(op, variant, asked(op.name, variant, choice, place))
    ]
    presets = {} if ops else {name: registry.preset(name) for name in registry.backends()[2:]}
    if as_json:
        output.emit_json({"system": str(place), "choice": str(choice), "presets": presets, "kernels": rows})
        return
    show(rows, presets, f"{place}; kernels = {choice}")


def _ops_meant(names: Sequence[str]) -> list[Op]:
    """The ops that the names are, if there is one among them.

    Raises:
        UsageError: another one is no op, or none is the name of a family but one is nearly an op's.
    """
    from veomni_hook.cli.inputs.targets import families
    from veomni_hook.kernels.selection.registry import registry
    from veomni_hook.patches.code.nearest_names import is_near_miss

    ops = registry.ops()
    named = any(name in ops for name in names)
    for name in names:
        near = [op for op in ops if is_near_miss(name, op)]
        if name not in ops and (named or (near and name not in families())):
            fix = f"nearest ops: {', '.join(near)}" if near else "name ops only, or families only"
            raise UsageError(f"there is no op {name!r}", where="veomni-hook kernels", fix=fix)
    return [ops[name] for name in names if name in ops]


def show(rows: Sequence[Mapping[str, Any]], presets: Mapping[str, Sequence[str]], heading: str) -> None:
    """Print the kernels with the decisions about them, and the meaning of each preset."""
    output.emit_heading(heading)
    output.emit_table(HEADERS, [[row[header] for header in HEADERS] for row in rows])
    if presets:
        output.emit_heading("\npresets: the ops that get a backend which is chosen for all ops")
        output.emit_fields({name: ", ".join(ops) for name, ops in presets.items()})


def _tell_models(table: Table, choice: Choice, place: System, *, models: bool, as_json: bool) -> None:
    from veomni_hook.cli.kernels import places
    from veomni_hook.cli.sites.table import warn_of

    report = places.report(table, choice, place)
    if as_json:
        output.emit_json(
            {"system": str(place), "choice": str(choice), **places.to_json(report, summary=models)}
        )
    else:
        (places.show_summary if models else places.show)(report, f"{place}; kernels = {choice}")
    warn_of(report.errors)
    if report.errors:
        raise typer.Exit(FOUND)


def _rows(op: Op, variant: str, answer: Asked) -> list[dict[str, Any]]:
    """A row for each backend of a variant, and one for the upstream code."""
    from veomni_hook.kernels.selection.registry import registry

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

"""`veomni-hook kernels`: list all kernels, and which one each op or place in a model gets, and why."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_hook import accelerator
from veomni_hook.cli import output
from veomni_hook.cli.inputs.options import JobsOption, JsonOption, TypeOption
from veomni_hook.cli.inputs.targets import complete_family
from veomni_hook.cli.usage import FOUND, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veomni_hook.kernels.selection.select import Selection
    from veomni_hook.kernels.selection.system import System

HEADERS = ("op", "variant", "backend", "chosen", "reason", "description")
NONE = "none"
SYSTEMS = ("cpu", "sm80", "sm90", "sm100", "ascend")


def kernels(
    families: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FAMILY",
            help="Show which kernel each routed place of these families, modules or Python files gets.",
            autocompletion=complete_family,
            show_default=False,
        ),
    ] = None,
    device: TypeOption = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show it for another machine with all packages: cpu, sm80, sm90, sm100 or ascend.",
            autocompletion=complete_system,
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Read the transformers package in this folder (an unpacked wheel or a checkout), not the"
            " installed one.",
            show_default=False,
        ),
    ] = None,
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
    from veomni_hook.kernels.selection.choice import parse_choice
    from veomni_hook.kernels.selection.registry import registry

    choice = str(parse_choice(_choice()))  # before torch is imported, to report an invalid choice at once
    place = on(device, system)
    if families or models:
        _tell_models(families or (), choice, place, source, jobs, models=models, as_json=as_json)
        return
    if source is not None or jobs is not None:
        raise UsageError(
            "--source and --jobs need families",
            where="veomni-hook kernels",
            fix="name families, or add --models",
        )
    rows = [
        row
        for op in registry.ops().values()
        for variant in op.variants
        for row in _rows(op.name, variant, selection(op.name, variant, choice, place))
    ]
    presets = {name: registry.preset(name) for name in registry.backends()[2:]}
    if as_json:
        output.emit_json({"system": str(place), "choice": choice, "presets": presets, "kernels": rows})
        return
    show(rows, presets, f"{place}; kernels = {choice}")


def show(rows: Sequence[Mapping[str, Any]], presets: Mapping[str, Sequence[str]], heading: str) -> None:
    """Print the kernels with the decisions about them, and the meaning of each preset."""
    output.emit_heading(heading)
    output.emit_table(HEADERS, [[row[header] for header in HEADERS] for row in rows])
    output.emit_heading("\npresets: the ops that get a backend which is chosen for all ops")
    output.emit_fields({name: ", ".join(ops) for name, ops in presets.items()})


def complete_system(incomplete: str) -> list[str]:
    """Complete the name of a system for the shell."""
    return [name for name in SYSTEMS if name.startswith(incomplete)]


def on(device: str | None, system: str | None) -> System:
    """Return the system that options name.

    Raises:
        KernelError: both are given, or there is no such system.
    """
    from veomni_hook.errors import KernelError
    from veomni_hook.kernels.selection.system import System

    if system is None:
        return detected(device)
    if device is not None:
        raise KernelError(
            "--device and --system name two different systems",
            where="veomni-hook kernels",
            fix="give one of the two options",
        )
    return System.named(system)


def selection(op: str, variant: str, choice: str, system: System) -> Selection:
    """Return the selection for an op's variant.

    Raises:
        KernelError: the choice names something that does not exist.
    """
    from veomni_hook.kernels.selection.choice import parse_choice
    from veomni_hook.kernels.selection.select import select

    return select(op, variant, parse_choice(choice), system)


def chosen_for(op: str, variant: str) -> dict[str, object]:
    """Return the kernel that a slot asks first on this machine, with the decision about each backend."""
    selected = selection(op, variant, _choice(), detected(None))
    decisions = [f"{one.backend}: {one.reason}" for one in selected.decisions]
    return {"kernel": backend_of(selected), "decisions": decisions}


def backend_of(selected: Selection) -> str:
    """Return the backend that a slot asks first; ``eager``: upstream's code, ``none``: a call raises."""
    if selected.failure is not None:
        return NONE
    return selected.kernel.backend if selected.kernel else "eager"


@cache
def detected(device: str | None) -> System:
    """Return the system that kernels are selected for; imports torch."""
    from veomni_hook.kernels.selection.select import system_of

    return system_of(device or accelerator.best())


def _choice() -> str:
    from veomni_hook.settings import resolve

    return resolve().settings.kernels


def _tell_models(
    families: Sequence[str],
    choice: str,
    place: System,
    source: str | None,
    jobs: int | None,
    *,
    models: bool,
    as_json: bool,
) -> None:
    from veomni_hook.cli.kernels import places

    found = places.report(families, choice, place, source=source, jobs=jobs)
    if as_json:
        output.emit_json({"system": str(place), "choice": choice, **places.to_json(found, summary=models)})
    else:
        (places.show_summary if models else places.show)(found, f"{place}; kernels = {choice}")
    for reason, modules in found.errors.items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        output.warn(f"{modules[0]}{more}: {reason}")
    if found.errors:
        raise typer.Exit(FOUND)


def _rows(op: str, variant: str, selected: Selection) -> list[dict[str, Any]]:
    from veomni_hook.kernels.selection.registry import registry

    known = {kernel.backend: kernel for kernel in registry.kernels(op, variant)}
    first = backend_of(selected)
    rows = []
    for decision in selected.decisions:
        kernel = known.get(decision.backend)
        rows.append(
            {
                "op": op,
                "variant": variant,
                "formula": registry.ops()[op].variants[variant].formula,
                "backend": decision.backend,
                "chosen": decision.backend == first,
                "accepted": decision.accepted,
                "reason": decision.reason,
                "load": kernel.load if kernel else None,
                "description": kernel.description if kernel else "the upstream code",
            }
        )
    return rows

"""`veomni-hook kernels`: every kernel there is, and which one each op gets on this machine and why."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_hook.cli import output
from veomni_hook.cli.target_options import JsonOption

if TYPE_CHECKING:
    from veomni_hook.kernels.select import Selection
    from veomni_hook.kernels.system import System

HEADERS = ("op", "variant", "backend", "chosen", "reason", "description")


def kernels(
    device: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="A torch device type (cpu, cuda, npu); by default the best one here.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Another machine: cpu, sm80, sm90, sm100 or ascend; packages are assumed to be there.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List every kernel with the decision about it under the settings in force, on this machine or another.

    What depends on a single call (dtype, shapes, hooks) is decided there: `veomni_hook.explain(model)` tells.
    """
    from veomni_hook.kernels.choice import parse_choice
    from veomni_hook.kernels.registry import registry

    choice = str(parse_choice(_choice()))  # before torch is imported: a wrong one is told at once
    place = on(device, system)
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
    output.emit_heading(f"{place}; kernels = {choice}")
    output.emit_table(HEADERS, [[row[header] for header in HEADERS] for row in rows])
    output.emit_heading("\npresets: what a backend stands for where it is chosen for all ops")
    output.emit_fields({name: ", ".join(ops) for name, ops in presets.items()})


def on(device: str | None, system: str | None) -> System:
    """Return the system that options name.

    Raises:
        KernelError: both are given, or there is no such system.
    """
    from veomni_hook.errors import KernelError
    from veomni_hook.kernels.system import System

    if system is None:
        return detected(device)
    if device is not None:
        raise KernelError(
            "--device and --system are two systems", where="veomni-hook kernels", fix="give one of the two"
        )
    return System.named(system)


def selection(op: str, variant: str, choice: str, system: System) -> Selection:
    """Return what is selected for an op's variant.

    Raises:
        KernelError: the choice names what does not exist.
    """
    from veomni_hook.kernels.choice import parse_choice
    from veomni_hook.kernels.select import select

    return select(op, variant, parse_choice(choice), system)


def chosen_for(op: str, variant: str) -> dict[str, object]:
    """Return the kernel that a slot asks first on this machine, with the decision about each backend."""
    selected = selection(op, variant, _choice(), detected(None))
    decisions = [f"{one.backend}: {one.reason}" for one in selected.decisions]
    return {"kernel": _first(selected), "decisions": decisions}


@cache
def detected(device: str | None) -> System:
    """Return the system that kernels are selected for; imports torch."""
    from veomni_hook.kernels.select import system_of

    return system_of(device or _best_device())


def _best_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def _choice() -> str:
    from veomni_hook.settings import resolve

    return resolve().settings.kernels


def _first(selected: Selection) -> str:
    """The backend that a slot asks first; ``none`` where a call is an error."""
    if selected.failure is not None:
        return "none"
    return selected.kernel.backend if selected.kernel else "eager"


def _rows(op: str, variant: str, selected: Selection) -> list[dict[str, Any]]:
    from veomni_hook.kernels.registry import registry

    known = {kernel.backend: kernel for kernel in registry.kernels(op, variant)}
    first = _first(selected)
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

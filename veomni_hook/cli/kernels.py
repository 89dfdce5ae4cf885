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
    *,
    as_json: JsonOption = False,
) -> None:
    """List every kernel with the decision about it under the settings in force, on this machine.

    What depends on a single call (dtype, shapes, hooks) is decided there: `veomni_hook.explain(model)` tells.
    """
    from veomni_hook.kernels.choice import parse_choice
    from veomni_hook.kernels.registry import registry

    choice = str(parse_choice(_choice()))  # before torch is imported: a wrong one is told at once
    system = detected(device)
    rows = [
        row
        for op in registry.ops().values()
        for variant in op.variants
        for row in _rows(op.name, variant, selection(op.name, variant, choice, system))
    ]
    if as_json:
        output.emit_json({"system": str(system), "choice": choice, "kernels": rows})
        return
    output.emit_heading(f"{system}; kernels = {choice}")
    output.emit_table(HEADERS, [[row[header] for header in HEADERS] for row in rows])


def selection(op: str, variant: str, choice: str, system: System) -> Selection:
    """Return what is selected for an op's variant.

    Raises:
        KernelError: the choice names what does not exist or cannot run there.
    """
    from veomni_hook.kernels.choice import parse_choice
    from veomni_hook.kernels.select import select

    return select(op, variant, parse_choice(choice), system)


def chosen_for(op: str, variant: str) -> dict[str, object]:
    """Return the kernel that a slot asks first on this machine, with the decision about each backend."""
    selected = selection(op, variant, _choice(), detected(None))
    decisions = [f"{one.backend}: {one.reason}" for one in selected.decisions]
    return {"kernel": selected.kernel.backend if selected.kernel else "eager", "decisions": decisions}


@cache
def detected(device: str | None) -> System:
    """Return the system that kernels are selected for; imports torch."""
    from veomni_hook.kernels.system import System

    return System.detect(device or _best_device())


def _best_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def _choice() -> str:
    from veomni_hook.settings import resolve

    return resolve().settings.kernels


def _rows(op: str, variant: str, selected: Selection) -> list[dict[str, Any]]:
    from veomni_hook.kernels.registry import EAGER, registry

    known = {kernel.backend: kernel for kernel in registry.kernels(op, variant)}
    first = selected.kernel.backend if selected.kernel is not None else EAGER
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

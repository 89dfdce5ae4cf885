"""`veomni-hook coverage`: every place in a release that computes an op, routed to a kernel or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.cli import output
from veomni_hook.cli.inputs.options import JobsOption, JsonOption, SourceOption, families_argument
from veomni_hook.cli.inputs.targets import family_of
from veomni_hook.cli.usage import FOUND, UsageError

if TYPE_CHECKING:
    from veomni_hook.patches.coverage import Row, Total

HEADERS = ("status", "op", "variant", "family", "target", "reason")
TOTAL_HEADERS = (
    "op",
    "candidates",
    "routed",
    "share",
    "no kernel",
    "missed",
    "refused",
    "unbound",
    "call sites",
    "unbound calls",
)
# Columns that a narrow terminal drops first.
LESS_NEEDED = ("unbound", "missed", "no kernel", "refused", "call sites", "unbound calls")


def coverage(  # noqa: PLR0913 - the options of a command
    families: Annotated[
        list[str] | None,
        families_argument("Only these families, modules or Python files. Default: all of transformers."),
    ] = None,
    source: SourceOption = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP=PERCENT",
            help="Exit with 1 if a smaller share of this op is routed to kernels. Can be repeated.",
            autocompletion=complete_required,
            show_default=False,
        ),
    ] = None,
    jobs: JobsOption = None,
    *,
    missed: Annotated[bool, typer.Option("--missed", help="Show only what is not routed.")] = False,
    call_sites: Annotated[
        bool,
        typer.Option(
            "--call-sites",
            help="Also show the calls at which a kernel is asked for, if not in the candidate itself.",
        ),
    ] = False,
    only_totals: Annotated[bool, typer.Option("--totals", help="Show only the totals of each op.")] = False,
    only_denominators: Annotated[
        bool, typer.Option("--denominators", help="Say what counts as a candidate of each op, and exit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which code of transformers is routed to kernels, and why other code is not. Nothing is imported.

    A candidate is code that looks like an op (for example RMSNorm), by its name or its structure. An idiom is
    a recogniser of one operation by the structure of its code. The status of a candidate is one of these:

    routed: the patched code asks for a kernel, and falls back to the upstream code.

    no_kernel: recognised, but no machine has a kernel for this formula. The upstream code runs.

    unbound: recognised, but there is no module that the kernel could belong to.

    missed: not recognised. The reason names the nearest idiom and the first difference.

    refused: sequence parallelism refuses a loop over layers (layer_loop), or parts that make speech cannot
    be left out (speech). The reason names what mixes positions, or how the class differs. A routed loop runs
    on a part of the positions.

    Exits with 1 if a module or an idiom fails, or if --require is not met.
    """
    from veomni_hook.cli.sites.table import failures, rows_of, site_table, supplied, warn_of
    from veomni_hook.patches.coverage import totals
    from veomni_hook.patches.idioms.recognise import OPTIONAL

    if only_denominators:
        _print_denominators(as_json=as_json)
        return
    required = _required(require or ())
    rows = supplied(rows_of(site_table(families or (), source, jobs, optional=OPTIONAL)))
    all_totals = totals(rows)
    _known(required, [total.op for total in all_totals])
    shown = [row for row in rows if _is_shown(row, missed=missed, call_sites=call_sites)]
    if as_json:
        output.emit_json([one.to_dict() for one in (all_totals if only_totals else shown)])
    else:
        show([] if only_totals else shown, all_totals)
    failed = failures(rows)
    warn_of(failed)
    short = [total for total in all_totals if total.share < required.get(total.op, 0.0)]
    for total in short:
        output.warn(f"{total.op}: {total.share:.1f} % routed, {required[total.op]:g} % required")
    if failed or short:
        raise typer.Exit(FOUND)


def show(rows: Sequence[Row], all_totals: Sequence[Total]) -> None:
    """Print the candidates, and the totals of each op."""
    _print_rows(rows)
    _print_totals(all_totals)


def _is_shown(row: Row, *, missed: bool, call_sites: bool) -> bool:
    from veomni_hook.patches.coverage import ROUTED

    return (row.counted or call_sites) and not (missed and row.status == ROUTED)


def complete_required(incomplete: str) -> list[str]:
    """Complete the op of `--require` for the shell."""
    from veomni_hook.patches.coverage import totals

    return [f"{total.op}=" for total in totals(()) if total.op.startswith(incomplete)]


def _required(options: Sequence[str]) -> dict[str, float]:
    """Read ``op=percent`` options.

    Raises:
        UsageError: an option does not have this form, or names an unknown op.
    """
    from veomni_hook.patches.coverage import totals

    known = [total.op for total in totals(())]
    required: dict[str, float] = {}
    for option in options:
        op, _, percent = option.partition("=")
        try:
            required[op] = float(percent)
        except ValueError:
            raise UsageError(
                f"{option!r} is not of the form op=percent",
                where="--require",
                fix="write for example rms_norm=98",
            ) from None
        _known([op.partition("/")[0]], known)
    return required


def _known(ops: Iterable[str], known: Sequence[str]) -> None:
    """Raise for names that are not ops or parts of ops with a total."""
    for op in ops:
        if op not in known:
            fix = f"name one of: {', '.join(known)}"
            raise UsageError(f"there is no total of {op!r}", where="--require", fix=fix)


def _print_rows(rows: Sequence[Row]) -> None:
    if not rows:
        return
    cells = [(r.status, r.op, r.variant, family_of(r.module), r.target, r.reason) for r in rows]
    output.emit_table(HEADERS, cells)
    output.emit("\n")


def _print_totals(all_totals: Sequence[Total]) -> None:
    rows = [
        (
            total.op,
            total.candidates,
            total.routed,
            f"{total.share:.1f} %" if total.candidates else None,
            total.no_kernel,
            total.missed,
            total.refused,
            total.unbound,
            total.call_sites,
            total.unbound_call_sites,
        )
        for total in all_totals
    ]
    output.emit_table(TOTAL_HEADERS, rows, optional=LESS_NEEDED)


def _print_denominators(*, as_json: bool) -> None:
    from veomni_hook.patches.coverage import denominators

    candidates = denominators()
    if as_json:
        output.emit_json(candidates)
        return
    output.emit_table(
        ("op", "what counts as a candidate"), [(op, one) for op, said in candidates.items() for one in said]
    )

"""`veomni-hook coverage`: every place in a release that computes an op, routed to a kernel or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.cli import output
from veomni_hook.cli.inputs.options import JobsOption, JsonOption
from veomni_hook.cli.inputs.targets import complete_family, family_of
from veomni_hook.cli.usage import FOUND, UsageError
from veomni_hook.layout import counted

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
    "unbound",
    "call sites",
    "unbound calls",
)
# Columns that a narrow terminal drops first.
LESS_NEEDED = ("unbound", "missed", "no kernel", "call sites", "unbound calls")

FamiliesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FAMILY",
        help="Only these families, modules or Python files. Default: all of transformers.",
        autocompletion=complete_family,
        show_default=False,
    ),
]


def coverage(  # noqa: PLR0913 - the options of a command
    families: FamiliesArgument = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Read the transformers package in this folder (an unpacked wheel or a checkout), not the"
            " installed one.",
            show_default=False,
        ),
    ] = None,
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

    Exits with 1 if a module or an idiom fails, or if --require is not met.
    """
    from veomni_hook.patches.coverage import ERROR, totals

    if only_denominators:
        _print_denominators(as_json=as_json)
        return
    wanted = _required(require or ())
    rows = supplied(examined(families or (), source, jobs))
    found = totals(rows)
    _known(wanted, [total.op for total in found])
    shown = [row for row in rows if _is_shown(row, missed=missed, call_sites=call_sites)]
    if as_json:
        output.emit_json([one.to_dict() for one in (found if only_totals else shown)])
    else:
        show([] if only_totals else shown, found)
    failed = [row for row in rows if row.status == ERROR]
    for reason, modules in _by_reason(failed).items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        output.warn(f"{modules[0]}{more}: {reason}")
    short = [total for total in found if total.share < wanted.get(total.op, 0.0)]
    for total in short:
        output.warn(f"{total.op}: {total.share:.1f} % routed, {wanted[total.op]:g} % required")
    if failed or short:
        raise typer.Exit(FOUND)


def examined(families: Sequence[str], source: str | None, jobs: int | None) -> list[Row]:
    """Return the rows of all modules that the user named, sorted.

    Raises:
        UsageError: a family or the source folder does not exist.
    """
    from veomni_hook.cli.inputs.sources import source_tree
    from veomni_hook.cli.sites.survey import survey
    from veomni_hook.errors import VeomniHookError
    from veomni_hook.patches.coverage import examine, failure

    tree = source_tree(source)
    files = tree.files(families)
    output.note(f"transformers {tree.version}, {counted(len(files), 'module')}")
    rows: list[Row] = []
    for module, found in zip(files, survey(examine, files, "reading", jobs=jobs), strict=True):
        rows += [failure(module, found.what)] if isinstance(found, VeomniHookError) else found
    return sorted(rows)


def supplied(rows: Iterable[Row]) -> list[Row]:
    """Return rows with status `no_kernel` instead of routed where no machine has a kernel."""
    from dataclasses import replace

    from veomni_hook.kernels.selection.choice import Choice
    from veomni_hook.kernels.selection.registry import registry
    from veomni_hook.kernels.selection.select import UNSUPPLIED, excluded
    from veomni_hook.patches.coverage import NO_KERNEL, ROUTED

    def told(row: Row) -> Row:
        known = registry.ops()[row.op].variants if row.status == ROUTED and row.op in registry.ops() else {}
        variants = [one for one in row.variant.split("|") if one in known]
        why = {one: reason for one in variants if (reason := excluded(row.op, one, Choice())) is not None}
        if not why:
            return row
        said = [reason if len(variants) == 1 else f"{one}: {reason}" for one, reason in why.items()]
        without = len(why) == len(variants) and set(why.values()) == {UNSUPPLIED}
        reason = "; ".join(filter(None, (*said, row.reason)))
        return replace(row, status=NO_KERNEL if without else ROUTED, reason=reason)

    return sorted(told(row) for row in rows)


def show(rows: Sequence[Row], found: Sequence[Total]) -> None:
    """Print the candidates, and the totals of each op."""
    _print_rows(rows)
    _print_totals(found)


def _by_reason(failed: Sequence[Row]) -> dict[str, list[str]]:
    """Return the modules of each error; an idiom that fails everywhere is reported once."""
    found: dict[str, list[str]] = {}
    for row in failed:
        found.setdefault(row.reason, []).append(row.module)
    return found


def _is_shown(row: Row, *, missed: bool, call_sites: bool) -> bool:
    from veomni_hook.patches.coverage import ROUTED

    return (row.counted or call_sites) and not (missed and row.status == ROUTED)


def complete_required(incomplete: str) -> list[str]:
    """Complete the op of `--require` for the shell."""
    from veomni_hook.patches.coverage import totals

    return [f"{total.op}=" for total in totals(()) if total.op.startswith(incomplete)]


def _required(given: Sequence[str]) -> dict[str, float]:
    """Read ``op=percent`` options.

    Raises:
        UsageError: an option does not have this form, or names an unknown op.
    """
    from veomni_hook.patches.coverage import totals

    known = [total.op for total in totals(())]
    found: dict[str, float] = {}
    for one in given:
        op, _, percent = one.partition("=")
        try:
            found[op] = float(percent)
        except ValueError:
            raise UsageError(
                f"{one!r} is not of the form op=percent",
                where="--require",
                fix="write for example rms_norm=98",
            ) from None
        _known([op.partition("/")[0]], known)
    return found


def _known(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise for names that are not ops or parts of ops with a total."""
    for op in given:
        if op not in known:
            fix = f"name one of: {', '.join(known)}"
            raise UsageError(f"there is no total of {op!r}", where="--require", fix=fix)


def _print_rows(rows: Sequence[Row]) -> None:
    if not rows:
        return
    cells = [(r.status, r.op, r.variant, family_of(r.module), r.target, r.reason) for r in rows]
    output.emit_table(HEADERS, cells)
    output.emit("\n")


def _print_totals(found: Sequence[Total]) -> None:
    rows = [
        (
            total.op,
            total.candidates,
            total.routed,
            f"{total.share:.1f} %" if total.candidates else None,
            total.no_kernel,
            total.missed,
            total.unbound,
            total.call_sites,
            total.unbound_call_sites,
        )
        for total in found
    ]
    output.emit_table(TOTAL_HEADERS, rows, optional=LESS_NEEDED)


def _print_denominators(*, as_json: bool) -> None:
    from veomni_hook.patches.coverage import denominators

    found = denominators()
    if as_json:
        output.emit_json(found)
        return
    output.emit_table(
        ("op", "what counts as a candidate"), [(op, one) for op, said in found.items() for one in said]
    )

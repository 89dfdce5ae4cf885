"""What `veomni-hook list` shows by site and by op: each place that computes an op, and the totals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.targets import family_of
from veomni_hook.tools.cli.usage import UsageError
from veomni_hook.tools.coverage import Row, Total, totals

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


def tell(
    rows: Sequence[Row], listed: Iterable[Row] | None, required: Mapping[str, float], *, as_json: bool
) -> bool:
    """Print sites and totals, or only totals; return whether as much is routed as is required.

    Args:
        rows: all sites.
        listed: those to print; None: only the totals.
        required: the smallest percentages of ops.
        as_json: print one JSON document, of the sites or of the totals.

    Raises:
        UsageError: a required op has no total.
    """
    all_totals = totals(rows)
    shares = {total.op: total.share for total in all_totals}
    check_names(required, shares)
    if as_json:
        output.emit_json([one.to_dict() for one in (all_totals if listed is None else listed)])
    else:
        show([*(listed or ())], all_totals)
    short = [op for op, percent in required.items() if shares[op] < percent]
    for op in short:
        output.warn(f"{op}: {shares[op]:.1f} % routed, {required[op]:g} % required")
    return not short


def show(rows: Sequence[Row], all_totals: Sequence[Total]) -> None:
    """Print the candidates, and the totals of each op."""
    if rows:
        cells = [(r.status, r.op, r.variant, family_of(r.module), r.target, r.reason) for r in rows]
        output.emit_table(HEADERS, cells)
        output.emit("\n")
    counts = [
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
    output.emit_table(TOTAL_HEADERS, counts, optional=LESS_NEEDED)


def required_shares(options: Sequence[str]) -> dict[str, float]:
    """Read ``op=percent`` options.

    Raises:
        UsageError: an option does not have this form, or names an unknown op.
    """
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
        check_names([op.partition("/")[0]], [total.op for total in totals(())])
    return required


def check_names(ops: Iterable[str], known: Iterable[str]) -> None:
    """Raise for names that are not ops or parts of ops with a total."""
    known = list(known)
    for op in ops:
        if op not in known:
            fix = f"name one of: {', '.join(known)}"
            raise UsageError(f"there is no total of {op!r}", where="--require", fix=fix)


def show_denominators(*, as_json: bool) -> None:
    """Print what counts as a candidate of each op."""
    from veomni_hook.tools.coverage import denominators

    candidates = denominators()
    if as_json:
        output.emit_json(candidates)
        return
    output.emit_table(
        ("op", "what counts as a candidate"), [(op, one) for op, said in candidates.items() for one in said]
    )

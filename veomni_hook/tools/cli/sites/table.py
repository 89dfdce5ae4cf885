"""The site table: every place of some modules that computes an op, routed to a kernel or not.

`list` shows its rows, or counts them by family, module or op. `explain` shows one module: the rows that its
patch report contains, with the status from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TypeAlias

from veomni_hook.errors import VeomniHookError
from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import UNSUPPLIED, excluded
from veomni_hook.patches.idioms.recognise import OPTIONAL
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.sites.survey import survey
from veomni_hook.tools.coverage import ERROR, NO_KERNEL, ROUTED, Row, examine, failure

__all__ = ["Table", "examined", "rows_of", "supplied", "supply", "warn_of_failures"]

#: The rows of each module; a module without candidates has none.
Table: TypeAlias = dict[str, list[Row]]


def examined(files: Mapping[str, str], jobs: int | None = None) -> Table:
    """Return the table of modules by their files, with optional idioms; nothing is imported.

    A file that cannot be read has one row, its error.

    Raises:
        VeomniHookError: a worker process was killed.
    """
    look = partial(examine, optional=OPTIONAL)
    results = zip(files, survey(look, files, "reading", jobs=jobs), strict=True)
    return {
        module: [failure(module, rows.what)] if isinstance(rows, VeomniHookError) else rows
        for module, rows in results
    }


def rows_of(table: Table) -> list[Row]:
    """Return the rows of all modules, sorted."""
    return sorted(row for rows in table.values() for row in rows)


def supplied(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, sorted, with status `no_kernel` instead of routed where no machine has a kernel."""
    asked = cache(supply)

    def one(row: Row) -> Row:
        status, reason = asked(row.op, row.variant)
        return replace(row, status=status, reason="; ".join(filter(None, (reason, row.reason))))

    return sorted(one(row) if row.status == ROUTED else row for row in rows)


def supply(op: str, variant: str) -> tuple[str, str]:
    """Return whether any machine has a kernel for a slot, `routed` or `no_kernel`, and a reason or "".

    Args:
        op: the op; one that the registry does not know counts as routed.
        variant: the formula; several, joined by `|`, if a flag in the module selects one.
    """
    variants = [one for one in variant.split("|") if op in registry.names() and registry.variant(op, one)]
    why = {one: reason for one in variants if (reason := excluded(op, one, Choice())) is not None}
    reasons = [reason if len(variants) == 1 else f"{one}: {reason}" for one, reason in why.items()]
    without = len(why) == len(variants) and set(why.values()) == {UNSUPPLIED}
    return NO_KERNEL if without else ROUTED, "; ".join(reasons)


def warn_of_failures(rows: Iterable[Row]) -> bool:
    """Write each error to stderr once, with its first module; return whether there is one."""
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.status == ERROR:
            failed.setdefault(row.reason, []).append(row.module)
    for reason, modules in failed.items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        output.warn(f"{modules[0]}{more}: {reason}")
    return bool(failed)

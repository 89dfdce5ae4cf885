"""What is routed to kernels in the families of a transformers package, read from its sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from veomni_hook.cache.store import open_store
from veomni_hook.cli import output
from veomni_hook.cli.coverage import supplied
from veomni_hook.cli.inputs.targets import family_folder
from veomni_hook.cli.sites.kept import examined_once
from veomni_hook.errors import VeomniHookError
from veomni_hook.patches.coverage import ERROR, ROUTED, Row, totals

if TYPE_CHECKING:
    from veomni_hook.cli.inputs.sources import SourceTree
    from veomni_hook.settings import Settings


def routed(
    tree: SourceTree, files: Mapping[str, str], settings: Settings, jobs: int | None
) -> tuple[dict[str, list[Row]], list[str]]:
    """Return the routed places of each module, and the modules that failed; a warning gives the reason.

    If the setting `idioms` is off, nothing is routed.
    """
    if not settings.idioms:
        return {module: [] for module in files}, []
    found: dict[str, list[Row]] = {}
    failed = []
    for module, rows in examined_once(tree.folder, files, open_store(settings.cache_dir), jobs).items():
        sites: list[Row] = [] if isinstance(rows, VeomniHookError) else rows
        reasons = [rows.what] if isinstance(rows, VeomniHookError) else []
        reasons += [row.reason for row in sites if row.status == ERROR]
        for reason in reasons:
            output.warn(f"{module}: {reason}")
        failed += [module] if reasons else []
        found[module] = [row for row in sites if row.status == ROUTED]
    return found, failed


def families_of(found: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Return for each family its modules, how often each op is routed, and how often without a kernel."""
    order = [total.op for total in totals(())]
    held: dict[str, list[str]] = {}
    for module in found:
        held.setdefault(family_folder(module), []).append(module)
    rows = []
    for family, modules in held.items():
        sites = supplied(row for module in modules for row in found[module] if row.counted)
        rows.append(
            {
                "family": family,
                "modules": modules,
                "ops": _counts(order, (row for row in sites if row.status == ROUTED)),
                "no_kernel": _counts(order, (row for row in sites if row.status != ROUTED)),
            }
        )
    return rows


def _counts(order: Sequence[str], sites: Iterable[Row]) -> dict[str, int]:
    counts = Counter(row.op for row in sites)
    return {op: counts[op] for op in sorted(counts, key=order.index)}

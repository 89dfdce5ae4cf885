"""What `veomni-hook kernels` shows for models: their routed places, and the kernel of each on a system."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING

from veomni_hook.cli import output
from veomni_hook.cli.inputs.sources import SHARED
from veomni_hook.cli.inputs.targets import family_folder
from veomni_hook.cli.sites.kernel import NONE, Asked, asked
from veomni_hook.cli.sites.table import Table, failures, rows_of
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.layout import counted
from veomni_hook.patches.coverage import ERROR, ROUTED

if TYPE_CHECKING:
    from veomni_hook.kernels.selection.choice import Choice
    from veomni_hook.kernels.selection.system import System
    from veomni_hook.patches.coverage import Row

HEADERS = ("family", "target", "op", "variant", "backend", "reason")
TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Routed:
    """One candidate that has a kernel slot, and the backend that the slot asks first.

    Attributes:
        family: the folder of the model; a module's name outside `transformers.models`.
        module: the modeling module.
        target: the target that a patch would name.
        op: the op's name.
        variant: the formula; several, joined by `|`, if a flag in the module selects one.
        backend: the kernel's backend, `eager` for the upstream code, `none` if a call raises; for several
            variants the weakest of theirs.
        reason: why.
        backends: the backend of each variant.
    """

    family: str
    module: str
    target: str
    op: str
    variant: str
    backend: str
    reason: str
    backends: dict[str, str]


@dataclass(frozen=True, slots=True)
class Summary:
    """The number of places of a family per backend; `unrouted` candidates run the upstream code."""

    family: str
    sites: int
    backends: dict[str, int]
    unrouted: int


@dataclass(frozen=True, slots=True)
class Report:
    """The complete result.

    Attributes:
        sites: sorted by module and target.
        families: a row for each family, also for those without candidates.
        total: their sum.
        errors: the modules that could not be examined, by reason.
    """

    sites: list[Routed]
    families: list[Summary]
    total: Summary
    errors: dict[str, list[str]]


def report(table: Table, choice: Choice, system: System) -> Report:
    """Return the kernels of the routed places in a table, for a choice of kernels and a system."""
    rows = rows_of(table)
    # Some idioms change code without asking for a kernel: their ops have none.
    candidates = [row for row in rows if row.counted and row.status != ERROR and row.op in registry.ops()]
    ask = cache(lambda op, variant: asked(op, variant, choice, system))
    sites = [
        _routed(row, {one: ask(row.op, one) for one in row.variant.split("|")})
        for row in candidates
        if row.status == ROUTED
    ]
    unrouted = [row for row in candidates if row.status != ROUTED]
    # A family without candidates has no rows; a shared module counts as a family only if it has candidates.
    families = {family_folder(row.module) for row in candidates}
    families |= {family_folder(module) for module in table if module not in SHARED}
    names = _backends(sites)
    summaries = [
        _summary(family, its_sites, its_unrouted, names)
        for family, its_sites, its_unrouted in _grouped(sorted(families), sites, unrouted)
    ]
    return Report(sites, summaries, _summary(TOTAL, sites, len(unrouted), names), failures(rows))


def show(found: Report, heading: str) -> None:
    """Print every routed place, and the number of places per backend."""
    output.emit_heading(heading)
    output.emit_table(HEADERS, [[getattr(site, header) for header in HEADERS] for site in found.sites])
    total = found.total
    each = ", ".join(f"{name} {count}" for name, count in total.backends.items())
    unrouted = counted(total.unrouted, "candidate is", "candidates are")
    output.emit_text(f"\n{total.sites} routed: {each}; {unrouted} not routed\n")


def show_summary(found: Report, heading: str) -> None:
    """Print a row for each family, and their sum."""
    output.emit_heading(heading)
    names = [*found.total.backends]
    output.emit_table(
        ("family", "routed", *names, "not routed"),
        [
            (one.family, one.sites, *(one.backends[name] for name in names), one.unrouted)
            for one in (*found.families, found.total)
        ],
    )


def to_json(found: Report, *, summary: bool) -> dict[str, object]:
    """Return the sites, or the summary of each family, and the totals as JSON-ready values."""
    listed = {"models": found.families} if summary else {"sites": found.sites}
    total = asdict(found.total)
    del total["family"]
    return {**{name: [asdict(one) for one in rows] for name, rows in listed.items()}, "totals": total}


def _routed(row: Row, by_variant: dict[str, Asked]) -> Routed:
    weakest = min(by_variant, key=lambda variant: _rank(by_variant[variant].backend))
    backend, reason = by_variant[weakest].backend, by_variant[weakest].reason
    backends = {variant: one.backend for variant, one in by_variant.items()}
    others = [f"{variant} gets {other}" for variant, other in backends.items() if other != backend]
    if others:
        reason = "; ".join([f"{weakest}: {reason}", *others])
    if row.reason:
        reason = f"{reason} ({row.reason})"
    family = family_folder(row.module)
    return Routed(family, row.module, row.target, row.op, row.variant, backend, reason, backends)


def _rank(backend: str) -> int:
    return (NONE, EAGER).index(backend) if backend in (NONE, EAGER) else 2


def _backends(sites: Iterable[Routed]) -> list[str]:
    """The backends that some place gets, in the order of the registry; then always `eager` and `none`."""
    used = {site.backend for site in sites}
    return [*(name for name in registry.backends() if name in used - {EAGER}), EAGER, NONE]


def _grouped(
    families: Sequence[str], sites: Sequence[Routed], unrouted: Sequence[Row]
) -> list[tuple[str, list[Routed], int]]:
    by_family: dict[str, list[Routed]] = {family: [] for family in families}
    for site in sites:
        by_family[site.family].append(site)
    counts = Counter(family_folder(row.module) for row in unrouted)
    return [(family, its_sites, counts[family]) for family, its_sites in by_family.items()]


def _summary(family: str, sites: Sequence[Routed], unrouted: int, names: Sequence[str]) -> Summary:
    counts = Counter(site.backend for site in sites)
    return Summary(family, len(sites), {name: counts[name] for name in names}, unrouted)

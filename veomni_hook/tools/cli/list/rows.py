"""The rows of `veomni-hook list`: for each family, for each module, and for each config that patches one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from veomni_hook.kernels.selection.process_choice import unchosen
from veomni_hook.locate import locate
from veomni_hook.patches.idioms.recognise import OPTIONAL
from veomni_hook.tools.cli.inputs.targets import MODELS, family_folder, family_of
from veomni_hook.tools.cli.sites.table import Table, rows_of, supplied
from veomni_hook.tools.coverage import ROUTED, Row, totals
from veomni_hook.tools.facts import Facts

if TYPE_CHECKING:
    from veomni_hook.patches.spec import PatchConfig
    from veomni_hook.tools.cli.inputs.configs import Source
    from veomni_hook.tools.cli.inputs.sources import SourceTree

MODULE_HEADERS = ("family", "config", "from", "device", "patches", "slots", "installed", "routes")
IDIOMS = "idioms"


def family_rows(table: Table) -> list[Facts]:
    """Return for each family its modules, how often each op is routed, and how often without a kernel."""
    order = [total.op for total in totals(())]
    modules: dict[str, list[str]] = defaultdict(list)
    for module in table:
        modules[family_folder(module)].append(module)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in supplied(row for row in _routed(rows_of(table)) if row.counted):
        rows[family_folder(row.module)].append(row)
    return [
        {
            "family": family,
            "modules": names,
            "ops": _counts(order, (row for row in rows[family] if row.status == ROUTED)),
            "no_kernel": _counts(order, (row for row in rows[family] if row.status != ROUTED)),
        }
        for family, names in modules.items()
    ]


def module_rows(table: Table, kernels: str = "auto") -> list[Facts]:
    """Return a row for each module in which idioms patch something with this choice of kernels."""
    left = {op: bool(unchosen(op, kernels)) for op in {row.op for rows in table.values() for row in rows}}
    listed: list[Facts] = []
    for module, rows in table.items():
        sites = [row for row in _routed(rows) if not left[row.op]]
        edited = [row for row in sites if row.edited]
        if edited:
            listed.append(
                {
                    "family": family_of(module),
                    "module": module,
                    "config": None,
                    "from": IDIOMS,
                    "device": "any",
                    "patches": len(edited),
                    "slots": sorted({slot for row in edited for slot in row.slots}),
                    "installed": True,
                    "routes": dict(Counter(row.op for row in sites if row.counted)),
                }
            )
    return listed


def config_rows(tree: SourceTree, sources: Sequence[Source], wanted: Collection[str] = ()) -> list[Facts]:
    """Return a row for each config, or for each that applies to one of the wanted modules."""
    installed = tree.files() | tree.beside()
    return [
        {
            "family": family_of(config.source_module),
            "module": config.source_module,
            "config": config.name,
            "from": source.origin,
            "device": config.device or "any",
            "patches": len(config.patches),
            "slots": [slot.name for slot in config.slots],
            "installed": _is_installed(config, installed),
            "routes": {},
        }
        for source in sources
        for config in source.configs
        if not wanted or any(config.applies_to(module) for module in wanted)
    ]


def registered_rows() -> list[Facts]:
    """Return a row for each class in transformers' own class mapping, as configs have registered it."""
    from veomni_hook.tools.report.class_mapping import registered_classes

    return [
        {
            "family": "any",
            "module": "transformers.*",
            "config": f"{pattern} -> {kind.__module__}.{kind.__qualname__}",
            "from": "transformers' class mapping",
            "device": "any",
            "patches": 1,
            "slots": [],
            "installed": True,
            "routes": {},
        }
        for pattern, kind in registered_classes().items()
    ]


def bare_row(module: str) -> Facts:
    """Return the row of a module without patches."""
    shown = {"family": family_of(module), "module": module, "patches": 0, "slots": [], "installed": True}
    return {**dict.fromkeys(MODULE_HEADERS), **shown, "routes": {}}


def _routed(rows: Iterable[Row]) -> list[Row]:
    """The routed ones, of idioms that apply without a setting."""
    optional = {name.partition(".")[0] for name in OPTIONAL}
    return [row for row in rows if row.status == ROUTED and row.op not in optional]


def _is_installed(config: PatchConfig, installed: Collection[str]) -> bool:
    if config.is_pattern:
        return any(config.applies_to(module) for module in installed)
    module = config.source_module
    return module in installed or (not module.startswith(f"{MODELS}.") and locate(module) is not None)


def _counts(order: Sequence[str], sites: Iterable[Row]) -> dict[str, int]:
    counts = Counter(row.op for row in sites)
    return {op: counts[op] for op in sorted(counts, key=order.index)}

"""The rows of `veomni-hook list`: for each family, for each module, and for each config that patches one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from veomni_hook.cache.store import open_store
from veomni_hook.cli import output
from veomni_hook.cli.inputs.targets import MODELS, family_folder, family_of
from veomni_hook.cli.sites.kept import examined_once
from veomni_hook.cli.sites.table import Table, supplied
from veomni_hook.locate import locate
from veomni_hook.patches.coverage import ERROR, ROUTED, Row, totals

if TYPE_CHECKING:
    from veomni_hook.cli.inputs.configs import Source
    from veomni_hook.cli.inputs.sources import SourceTree
    from veomni_hook.patches.spec import PatchConfig
    from veomni_hook.settings import Settings

MODULE_HEADERS = ("family", "config", "from", "device", "patches", "slots", "installed", "routes")
IDIOMS = "idioms"


def routed(
    tree: SourceTree, files: Mapping[str, str], settings: Settings, jobs: int | None
) -> tuple[Table, list[str]]:
    """Return the table of the routed sites, and the modules that failed; a warning gives the reason.

    If the setting `idioms` is off, nothing is routed.
    """
    if not settings.idioms:
        return {module: [] for module in files}, []
    table = examined_once(tree.folder, files, open_store(settings.cache_dir), jobs)
    failed = [row for rows in table.values() for row in rows if row.status == ERROR]
    for row in failed:
        output.warn(f"{row.module}: {row.reason}")
    sites = {module: [row for row in rows if row.status == ROUTED] for module, rows in table.items()}
    return sites, list(dict.fromkeys(row.module for row in failed))


def family_rows(sites: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Return for each family its modules, how often each op is routed, and how often without a kernel."""
    order = [total.op for total in totals(())]
    modules_of: dict[str, list[str]] = {}
    for module in sites:
        modules_of.setdefault(family_folder(module), []).append(module)
    rows = []
    for family, modules in modules_of.items():
        counted = supplied(row for module in modules for row in sites[module] if row.counted)
        rows.append(
            {
                "family": family,
                "modules": modules,
                "ops": _counts(order, (row for row in counted if row.status == ROUTED)),
                "no_kernel": _counts(order, (row for row in counted if row.status != ROUTED)),
            }
        )
    return rows


def module_rows(sites: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Return a row for each module in which idioms patch something."""
    return [_routed(module, rows) for module, rows in sites.items() if any(row.edited for row in rows)]


def config_rows(
    tree: SourceTree, sources: Sequence[Source], wanted: Collection[str] = ()
) -> list[dict[str, Any]]:
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


def registered_rows() -> list[dict[str, Any]]:
    """Return a row for each class in transformers' own class mapping, as configs have registered it."""
    from veomni_hook.report.class_mapping import registered_classes

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


def bare_row(module: str) -> dict[str, Any]:
    """Return the row of a module without patches."""
    shown = {"family": family_of(module), "module": module, "patches": 0, "slots": [], "installed": True}
    return {**dict.fromkeys(MODULE_HEADERS), **shown, "routes": {}}


def _routed(module: str, sites: Sequence[Row]) -> dict[str, Any]:
    edited = [row for row in sites if row.edited]
    return {
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


def _is_installed(config: PatchConfig, installed: Collection[str]) -> bool:
    if config.is_pattern:
        return any(config.applies_to(module) for module in installed)
    module = config.source_module
    return module in installed or (not module.startswith(f"{MODELS}.") and locate(module) is not None)


def _counts(order: Sequence[str], sites: Iterable[Row]) -> dict[str, int]:
    counts = Counter(row.op for row in sites)
    return {op: counts[op] for op in sorted(counts, key=order.index)}

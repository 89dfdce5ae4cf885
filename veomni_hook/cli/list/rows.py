"""The rows of `veomni-hook list --modules`: one for each module and each config that patches it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from veomni_hook.cli.inputs.targets import MODELS, family_of
from veomni_hook.cli.list.families import routed

if TYPE_CHECKING:
    from veomni_hook.cli.inputs.configs import Source
    from veomni_hook.cli.inputs.sources import SourceTree
    from veomni_hook.patches.coverage import Row
    from veomni_hook.patches.spec import PatchConfig
    from veomni_hook.settings import Settings

HEADERS = ("family", "config", "from", "device", "patches", "slots", "installed", "routes")
IDIOMS = "idioms"


def list_modules(
    tree: SourceTree,
    sources: Sequence[Source],
    wanted: Mapping[str, str],
    settings: Settings,
    *,
    jobs: int | None,
    routes: bool,
    everything: bool,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows, and the modules that could not be examined.

    Args:
        tree: the installed transformers.
        sources: the config modules.
        wanted: only these modules, with their routes; empty: all modules that configs name.
        settings: the settings in force.
        jobs: number of processes.
        routes: also include the routes of every module.
        everything: also include modules without patches.
    """
    rows = config_rows(tree, sources, wanted)
    installed = tree.files()
    failed: list[str] = []
    if routes or wanted:
        found, failed = routed(tree, wanted or installed, settings, jobs)
        rows += [_routed(module, sites) for module, sites in found.items() if any(s.edited for s in sites)]
    if everything:
        known = {str(row["module"]) for row in rows}
        rows += [_bare(module) for module in wanted or installed if module not in known]
    return rows, failed


def config_rows(
    tree: SourceTree, sources: Sequence[Source], wanted: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return a row for each config, or for each that applies to one of the wanted modules."""
    installed = tree.files()
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


def _routed(module: str, sites: Sequence[Row]) -> dict[str, Any]:
    from veomni_hook.patches.routes.site import slot_name

    edited = [row for row in sites if row.edited]
    return {
        "family": family_of(module),
        "module": module,
        "config": None,
        "from": IDIOMS,
        "device": "any",
        "patches": len(edited),
        "slots": sorted({slot_name(row.op, one) for row in edited for one in row.variant.split("|") if one}),
        "installed": True,
        "routes": dict(Counter(row.op for row in sites if row.counted)),
    }


def _is_installed(config: PatchConfig, installed: Collection[str]) -> bool:
    from veomni_hook.finders.locate import locate

    if config.is_pattern:
        return any(config.applies_to(module) for module in installed)
    module = config.source_module
    return module in installed or (not module.startswith(f"{MODELS}.") and locate(module) is not None)


def _bare(module: str) -> dict[str, Any]:
    shown = {"family": family_of(module), "module": module, "patches": 0, "slots": [], "installed": True}
    return {**dict.fromkeys(HEADERS), **shown, "routes": {}}

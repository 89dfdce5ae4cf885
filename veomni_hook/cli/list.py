"""`veomni-hook list`: the modules that patches exist for, whose these are, and what idioms route there."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_hook.cli import output
from veomni_hook.cli.sources import source_tree
from veomni_hook.cli.target_options import JobsOption, JsonOption, import_from_here
from veomni_hook.cli.targets import MODELS, complete_family, family_of
from veomni_hook.cli.usage import FOUND

if TYPE_CHECKING:
    from veomni_hook.patches.spec import PatchConfig

HEADERS = ("family", "config", "from", "device", "patches", "slots", "installed", "routes")
IDIOMS = "idioms"


def list_(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FAMILY]...",
            help="Only these families or modules, with what idioms route there.",
            autocompletion=complete_family,
            show_default=False,
        ),
    ] = None,
    jobs: JobsOption = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the modeling modules that have no patches.")
    ] = False,
    routes: Annotated[
        bool, typer.Option("--routes", help="What idioms route in every module; that takes a while.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the modules that patches exist for: built-in specs, settings, and installed packages.

    Idioms find kernels' code in modules that no list names: they are asked about the families given, or about
    all with --routes. Exits with 1 when a config cannot be loaded, or where an idiom fails.
    """
    from veomni_hook.cli.spec_sources import load_sources, names
    from veomni_hook.settings import resolve

    import_from_here()
    tree = source_tree()
    wanted = tree.files(targets) if targets else {}
    sources = load_sources(names(resolve().settings))
    installed = tree.files()
    rows: list[dict[str, Any]] = [
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
    failed = False
    if routes or wanted:
        found, failed = _routed(wanted or installed, jobs)
        rows += found
    if everything:
        known = {str(row["module"]) for row in rows}
        rows += [_bare(module) for module in wanted or installed if module not in known]
    _show(rows, as_json=as_json)
    broken = [source for source in sources if source.error is not None]
    for source in broken:
        if source.error is not None:
            output.fail(source.error)
    if not (routes or wanted or as_json):
        output.note("what idioms route: `veomni-hook list FAMILY`, `veomni-hook coverage`")
    if broken or failed:
        raise typer.Exit(FOUND)


def _routed(files: dict[str, str], jobs: int | None) -> tuple[list[dict[str, Any]], bool]:
    """Return a row for each module in which idioms route something, and whether one failed."""
    from collections import Counter

    from veomni_hook.cli.survey import survey
    from veomni_hook.errors import VeomniHookError
    from veomni_hook.patches.coverage import ERROR, ROUTED, examine
    from veomni_hook.patches.routes.site import slot_name

    rows: list[dict[str, Any]] = []
    failed = False
    for module, found in zip(files, survey(examine, files, "reading", jobs=jobs), strict=True):
        sites = [] if isinstance(found, VeomniHookError) else found
        errors = [found.what] if isinstance(found, VeomniHookError) else []
        for reason in (*errors, *(row.reason for row in sites if row.status == ERROR)):
            output.warn(f"{module}: {reason}")
            failed = True
        routed = [row for row in sites if row.status == ROUTED]
        edited = [row for row in routed if row.edited]
        if not edited:
            continue
        listed = {
            "family": family_of(module),
            "module": module,
            "config": None,
            "from": IDIOMS,
            "device": "any",
            "patches": len(edited),
            "slots": sorted(
                {slot_name(row.op, one) for row in edited for one in row.variant.split("|") if one}
            ),
            "installed": True,
            "routes": dict(Counter(row.op for row in routed if row.counted)),
        }
        rows.append(listed)
    return rows, failed


def _show(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        output.emit_json(rows)
        return
    cells = [
        {
            **row,
            "slots": len(row["slots"]),
            "routes": [f"{op} {count}" for op, count in row["routes"].items()],
        }
        for row in rows
    ]
    output.emit_table(HEADERS, [[row[header] for header in HEADERS] for row in cells])


def _is_installed(config: PatchConfig, installed: Collection[str]) -> bool:
    from veomni_hook.finders.locate import locate

    if config.is_pattern:
        return any(config.applies_to(module) for module in installed)
    module = config.source_module
    return module in installed or (not module.startswith(f"{MODELS}.") and locate(module) is not None)


def _bare(module: str) -> dict[str, Any]:
    shown = {"family": family_of(module), "module": module, "patches": 0, "slots": [], "installed": True}
    return {**dict.fromkeys(HEADERS), **shown, "routes": {}}

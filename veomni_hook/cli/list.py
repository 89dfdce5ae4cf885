"""`veomni-hook list`: the modules that patches exist for, and whose patches these are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from veomni_hook.cli import output
from veomni_hook.cli.target_options import JsonOption, import_from_here
from veomni_hook.cli.targets import MODELS, families, family_of
from veomni_hook.cli.usage import FOUND

HEADERS = ("family", "config", "from", "device", "patches", "slots", "installed")


def list_(
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the modeling modules that have no patches.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the modules that patches exist for: built-in specs, settings, and installed packages.

    Exits with 1 when a config cannot be loaded.
    """
    from veomni_hook.cli.spec_sources import load_sources, names
    from veomni_hook.settings import resolve

    import_from_here()
    sources = load_sources(names(resolve().settings))
    installed = {f"{MODELS}.{family}.{file}" for family, files in families().items() for file in files}
    rows: list[dict[str, Any]] = [
        {
            "family": family_of(config.source_module),
            "module": config.source_module,
            "config": config.name,
            "from": source.origin,
            "device": config.device or "any",
            "patches": len(config.patches),
            "slots": [slot.name for slot in config.slots],
            "installed": _is_installed(config.source_module, installed),
        }
        for source in sources
        for config in source.configs
    ]
    if everything:
        rows += [_bare(module) for module in sorted(installed - {str(row["module"]) for row in rows})]
    broken = [source for source in sources if source.error is not None]
    if as_json:
        output.emit_json(rows)
    else:
        shown = [{**row, "slots": len(row["slots"])} for row in rows]
        output.emit_table(HEADERS, [[row[header] for header in HEADERS] for row in shown])
    for source in broken:
        if source.error is not None:
            output.fail(source.error)
    if broken:
        raise typer.Exit(FOUND)


def _is_installed(module: str, installed: set[str]) -> bool:
    from veomni_hook.finders.locate import locate

    return module in installed or (not module.startswith(MODELS + ".") and locate(module) is not None)


def _bare(module: str) -> dict[str, Any]:
    shown = {"family": family_of(module), "module": module, "patches": 0, "slots": [], "installed": True}
    return {**dict.fromkeys(HEADERS), **shown}

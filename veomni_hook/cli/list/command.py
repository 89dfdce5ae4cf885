"""`veomni-hook list`: families with the ops routed to kernels there, and the patches of your configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from veomni_hook.cli import output
from veomni_hook.cli.inputs.options import JobsOption, JsonOption, families_argument, import_from_here
from veomni_hook.cli.inputs.sources import SHARED, SourceTree, source_tree
from veomni_hook.cli.usage import FOUND
from veomni_hook.layout import counted

if TYPE_CHECKING:
    from veomni_hook.cli.inputs.configs import Source
    from veomni_hook.settings import Settings

HEADERS = ("family", "routed ops")
CONFIG_HEADERS = ("family", "config", "from", "device", "patches", "installed")


def list_(
    targets: Annotated[
        list[str] | None,
        families_argument("Only these families or modules."),
    ] = None,
    jobs: JobsOption = None,
    *,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also families (with --modules: modules) in which nothing is routed."),
    ] = False,
    modules: Annotated[
        bool,
        typer.Option(
            "--modules", help="List modules and the configs that patch them, also the built-in ones."
        ),
    ] = False,
    routes: Annotated[
        bool, typer.Option("--routes", help="With --modules: also what is routed in every module.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the model families of the installed transformers, with the ops that are routed to kernels there.

    "Routed" means that the patched code asks for a kernel and falls back to the upstream code. "(no kernel)"
    marks an op whose formula has no kernel on any machine: the upstream code runs. The patches of your
    configs and of installed packages follow.

    The first listing of all families can take a minute. Its result is kept in the cache folder, and later
    listings take about a second. Exits with 1 if a config cannot be loaded or a module cannot be examined.
    """
    from veomni_hook.cli.inputs.configs import load_sources, names
    from veomni_hook.settings import resolve

    import_from_here()
    tree = source_tree()
    settings = resolve().settings
    wanted = tree.files(targets) if targets else {}
    sources = load_sources(names(settings))
    listed = _Listed(tree, sources, wanted, settings, jobs)
    if modules or routes:
        failed = _list_modules(listed, routes=routes, everything=everything, as_json=as_json)
    else:
        failed = _list_families(listed, everything=everything, as_json=as_json)
    broken = [source.error for source in sources if source.error is not None]
    for error in broken:
        output.fail(error)
    if broken or failed:
        raise typer.Exit(FOUND)


class _Listed(NamedTuple):
    """What is listed: ``wanted`` are the modules that the user named, with their files; empty: all."""

    tree: SourceTree
    sources: Sequence[Source]
    wanted: Mapping[str, str]
    settings: Settings
    jobs: int | None


def _list_modules(listed: _Listed, *, routes: bool, everything: bool, as_json: bool) -> list[str]:
    """Print modules and the configs that patch them; return the modules that could not be examined."""
    from veomni_hook.cli.list.rows import bare_row, config_rows, module_rows, registered_rows, routed

    tree, sources, wanted, settings, jobs = listed
    rows = [*config_rows(tree, sources, wanted), *registered_rows()]
    files = wanted or tree.files()
    failed: list[str] = []
    if routes or wanted:
        sites, failed = routed(tree, files, settings, jobs)
        rows += module_rows(sites)
    if everything:
        with_patches = {row["module"] for row in rows}
        rows += [bare_row(module) for module in files if module not in with_patches]
    if as_json:
        output.emit_json(rows)
    else:
        _show_modules(rows)
    return failed


def _list_families(listed: _Listed, *, everything: bool, as_json: bool) -> list[str]:
    """Print families and configs; return the modules that could not be examined."""
    from veomni_hook.cli.inputs.configs import BUILT_IN
    from veomni_hook.cli.list.rows import config_rows, family_rows, registered_rows, routed

    tree, sources, wanted, settings, jobs = listed
    files = wanted or {module: path for module, path in tree.files().items() if module not in SHARED}
    sites, failed = routed(tree, files, settings, jobs)
    all_families = family_rows(sites)
    families = [row for row in all_families if everything or wanted or row["ops"] or row["no_kernel"]]
    configs = config_rows(tree, [one for one in sources if one.origin != BUILT_IN], wanted)
    configs += registered_rows()
    if as_json:
        output.emit_json({"transformers": tree.version, "families": families, "configs": configs})
        return failed
    show_families(families, configs)
    with_ops = sum(bool(row["ops"] or row["no_kernel"]) for row in all_families)
    said = counted(len(all_families), "family", "families")
    output.note(f"transformers {tree.version}: {with_ops} of {said} with routed ops")
    output.note("where they are, and why others are not routed: `veomni-hook coverage FAMILY`")
    return failed


def show_families(families: Sequence[Mapping[str, Any]], configs: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each family, and the configs that are not built in."""
    output.emit_table(HEADERS, [(row["family"], _ops(row)) for row in families])
    if configs:
        output.emit_heading("\nyour patches")
        output.emit_table(CONFIG_HEADERS, [[row[header] for header in CONFIG_HEADERS] for row in configs])


def _ops(row: Mapping[str, Any]) -> list[str]:
    without = [f"{op} (no kernel)" for op in row["no_kernel"] if op not in row["ops"]]
    return [*row["ops"], *without]


def _show_modules(rows: Sequence[Mapping[str, Any]]) -> None:
    from veomni_hook.cli.list.rows import MODULE_HEADERS

    cells = [
        {
            **row,
            "slots": len(row["slots"]),
            "routes": [f"{op} {count}" for op, count in row["routes"].items()],
        }
        for row in rows
    ]
    output.emit_table(MODULE_HEADERS, [[row[header] for header in MODULE_HEADERS] for row in cells])

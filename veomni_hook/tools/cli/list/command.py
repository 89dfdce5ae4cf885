"""`veomni-hook list`: families, modules, or places in them, with the ops that are routed to kernels there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.layout import counted
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import (
    JobsOption,
    JsonOption,
    OutputOption,
    families_argument,
    import_from_here,
)
from veomni_hook.tools.cli.inputs.sources import SHARED, SourceTree, source_tree
from veomni_hook.tools.cli.usage import FOUND, UsageError
from veomni_hook.tools.facts import Facts

if TYPE_CHECKING:
    from veomni_hook.tools.cli.inputs.configs import Source
    from veomni_hook.tools.cli.sites.table import Table

HEADERS = ("family", "routed ops")
CONFIG_HEADERS = ("family", "config", "from", "device", "patches", "installed")


class By(StrEnum):
    """What a line of the list is about."""

    family = "family"
    module = "module"
    site = "site"
    op = "op"


def complete_required(incomplete: str) -> list[str]:
    """Complete the op of `--require` for the shell."""
    from veomni_hook.tools.coverage import totals

    return [f"{total.op}=" for total in totals(()) if total.op.startswith(incomplete)]


def list_(  # noqa: PLR0913 - the options of a command
    targets: Annotated[
        list[str] | None, families_argument("List each site of these families, modules or Python files.")
    ] = None,
    by: Annotated[
        By | None,
        typer.Option(
            "--by",
            help="What a line is about. A site is a place that computes an op, and op means the totals.  "
            "[default: family; site for a FAMILY and --missed; op for --require]",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Read the transformers package in this folder (an unpacked wheel or a checkout), not the"
            " installed one.",
            show_default=False,
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP=PERCENT",
            help="Exit with 1 if a smaller share of this op is routed to kernels. Can be repeated.",
            autocompletion=complete_required,
            show_default=False,
        ),
    ] = None,
    jobs: JobsOption = None,
    file: OutputOption = None,
    *,
    missed: Annotated[bool, typer.Option("--missed", help="Only sites that are not routed.")] = False,
    call_sites: Annotated[
        bool,
        typer.Option(
            "--call-sites",
            help="Also the calls at which a kernel is asked for, if not in the candidate itself.",
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also families or modules in which nothing is routed.")
    ] = False,
    denominators: Annotated[
        bool, typer.Option("--denominators", help="Say what counts as a candidate of each op, and exit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the model families of transformers, or each place in one, with what is routed to kernels there.

    "Routed" means that the patched code asks for a kernel and falls back to the upstream code. "(no kernel)"
    marks an op whose formula has no kernel on any machine: the upstream code runs. The patches of your
    configs and of installed packages follow; by module, also the built-in ones. Nothing is imported but
    these.

    A site is a candidate: code that looks like an op (for example RMSNorm), by its name or its structure. An
    idiom is a recogniser of one operation by the structure of its code. The status of a site is one of these:

    routed: the patched code asks for a kernel, and falls back to the upstream code.

    no_kernel: recognised, but no machine has a kernel for this formula. The upstream code runs.

    unbound: recognised, but there is no module that the kernel could belong to.

    missed: not recognised. The reason names the nearest idiom and the first difference.

    refused: sequence parallelism refuses a loop over layers (layer_loop), or parts that make speech cannot
    be left out (speech). The reason names what mixes positions, or how the class differs. A routed loop runs
    on a part of the positions.

    The first listing of all families takes some seconds. Its result is kept in the cache folder. Exits with 1
    if a config cannot be loaded, a module or an idiom fails, or --require is not met.
    """
    from veomni_hook.cache.store import open_store
    from veomni_hook.settings import resolve
    from veomni_hook.tools.cli.list import sites
    from veomni_hook.tools.cli.sites.kept import site_table
    from veomni_hook.tools.cli.sites.table import rows_of, supplied, warn_of_failures
    from veomni_hook.tools.coverage import ROUTED

    if denominators:
        sites.show_denominators(as_json=as_json)
        return
    of_sites = missed or call_sites or bool(require)
    by = by or (By.site if targets or missed or call_sites else By.op if require else By.family)
    if of_sites and by in (By.family, By.module):
        raise UsageError(
            "--missed, --call-sites and --require are about sites",
            where=f"veomni-hook list --by {by}",
            fix="leave --by out, or use --by site",
        )
    required = sites.required_shares(require or ())
    tree, settings = source_tree(source), resolve().settings
    files = tree.files(targets or ())
    table: Table = {module: [] for module in files}
    if by in (By.site, By.op) or settings.idioms:
        table = site_table(tree, files, open_store(settings.cache_dir), jobs)
    rows = rows_of(table)
    if by in (By.site, By.op):
        rows = supplied(rows)
        listed = (
            row for row in rows if (row.counted or call_sites) and not (missed and row.status == ROUTED)
        )
        fine = sites.tell(rows, listed if by is By.site else None, required, as_json=as_json)
    else:
        tell = _tell_families if by is By.family else _tell_modules
        fine = tell(tree, table, files if targets else {}, everything=everything, as_json=as_json)
    if warn_of_failures(rows) or not fine:
        raise typer.Exit(FOUND)


def _tell_modules(
    tree: SourceTree, table: Table, wanted: Collection[str], *, everything: bool, as_json: bool
) -> bool:
    """Print modules and the configs that patch them; return whether every config could be loaded.

    ``wanted`` are the modules that the user named; empty: all.
    """
    from veomni_hook.settings import resolve
    from veomni_hook.tools.cli.list.rows import (
        MODULE_HEADERS,
        bare_row,
        config_rows,
        module_rows,
        registered_rows,
    )

    sources, fine = _sources()
    rows = [*config_rows(tree, sources, wanted), *registered_rows()]
    rows += module_rows(table, resolve().settings.kernels)
    if everything:
        with_patches = {row["module"] for row in rows}
        rows += [bare_row(module) for module in table if module not in with_patches]
    if as_json:
        output.emit_json(rows)
        return fine
    cells = [
        {
            **row,
            "slots": len(row["slots"]),
            "routes": [f"{op} {count}" for op, count in row["routes"].items()],
        }
        for row in rows
    ]
    output.emit_table(MODULE_HEADERS, [[row[header] for header in MODULE_HEADERS] for row in cells])
    return fine


def _tell_families(
    tree: SourceTree, table: Table, wanted: Collection[str], *, everything: bool, as_json: bool
) -> bool:
    """Print families and your configs, as `_tell_modules` does."""
    from veomni_hook.tools.cli.inputs.configs import BUILT_IN
    from veomni_hook.tools.cli.list.rows import config_rows, family_rows, registered_rows

    sources, fine = _sources()
    shared = () if wanted else SHARED
    every = family_rows({module: rows for module, rows in table.items() if module not in shared})
    with_ops = [row for row in every if row["ops"] or row["no_kernel"]]
    families = every if everything or wanted else with_ops
    own = [source for source in sources if source.origin != BUILT_IN]
    configs = [*config_rows(tree, own, wanted), *registered_rows()]
    if as_json:
        version = tree.version
        output.emit_json({"transformers": version, "families": families, "configs": configs})
    else:
        show_families(families, configs)
        said = counted(len(every), "family", "families")
        output.note(f"{len(with_ops)} of {said} with routed ops")
        output.note("where they are, and why others are not routed: `veomni-hook list FAMILY`")
    return fine


def _sources() -> tuple[list[Source], bool]:
    """Load the configs of the settings; return them, and whether none has failed."""
    from veomni_hook.settings import resolve
    from veomni_hook.tools.cli.inputs.configs import load_sources, names

    import_from_here()
    sources = load_sources(names(resolve().settings))
    errors = [source.error for source in sources if source.error is not None]
    for error in errors:
        output.fail(error)
    return sources, not errors


def show_families(families: Sequence[Facts], configs: Sequence[Facts]) -> None:
    """Print a line for each family, and the configs that are not built in."""
    cells = []
    for row in families:
        without = [f"{op} (no kernel)" for op in row["no_kernel"] if op not in row["ops"]]
        cells.append((row["family"], [*row["ops"], *without]))
    output.emit_table(HEADERS, cells)
    if configs:
        output.emit_heading("\nyour patches")
        output.emit_table(CONFIG_HEADERS, [[row[header] for header in CONFIG_HEADERS] for row in configs])

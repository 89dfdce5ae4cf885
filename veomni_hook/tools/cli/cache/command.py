"""`veomni-hook cache`: show what is stored, check it, remove it, and fill it before a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.errors import CacheError, VeomniHookError
from veomni_hook.layout import counted
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import JsonOption, OutputOption, families_argument, import_from_here
from veomni_hook.tools.cli.inputs.targets import module_name
from veomni_hook.tools.cli.usage import FOUND

if TYPE_CHECKING:
    from veomni_hook.cache.store import Store
    from veomni_hook.settings import Settings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Show, check, empty or fill the cache of patched modules.",
)


@app.command("info")
def info(file: OutputOption = None, *, as_json: JsonOption = False) -> None:
    """Show where the cache is and what it holds."""
    from veomni_hook.cache.store import open_store

    summary = open_store(_settings().cache_dir).info()
    if as_json:
        output.emit_json(summary.to_dict())
        return
    output.emit_fields(
        {
            "location": summary.root or None,
            "mode": summary.mode,
            "writable": summary.writable,
            "size": readable_size(summary.size),
            "patched modules": len(summary.entries),
            "known unpatched": summary.unpatched,
            "damaged": summary.damaged,
        }
    )
    if summary.entries:
        output.emit("\n")
        rows = [
            (e.module, f"{e.distribution} {e.version}", e.patch_hash, e.interpreter, readable_size(e.size))
            for e in summary.entries
        ]
        output.emit_table(("module", "source", "patch hash", "interpreter", "size"), rows)
    if summary.reason:
        output.warn(summary.reason)


@app.command("verify")
def verify(file: OutputOption = None, *, as_json: JsonOption = False) -> None:
    """Check every entry, byte for byte.

    An import never uses a damaged entry: it patches the module again. Exits with 1 if an entry is damaged.
    """
    verification = _disk_store().verify()
    if as_json:
        output.emit_json(verification.to_dict())
    else:
        rows = [
            *(("damaged", defect.path, defect.reason) for defect in verification.defects),
            *(("outdated", finding.path, finding.reason) for finding in verification.stale),
            *(("leftover", path, "belongs to no entry") for path in verification.leftovers),
        ]
        if rows:
            output.emit_table(("finding", "path", "reason"), rows)
        checked = counted(verification.checked, "entry", "entries")
        output.emit(
            f"{checked} checked, {len(verification.defects)} damaged, {len(verification.stale)} outdated\n"
        )
    if not verification.ok:
        output.note("fix: veomni-hook cache clear")
        raise typer.Exit(FOUND)


@app.command("clear")
def clear(
    file: OutputOption = None,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also remove entries that a running process uses.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove every entry that no running process uses, and what `list` keeps.

    Exits with 1 if something could not be removed.
    """
    from veomni_hook.tools.cli.sites.kept import forget

    store = _disk_store()
    done = store.clear(force=force)
    freed = done.freed + forget(store)
    if as_json:
        output.emit_json({**done.to_dict(), "freed": freed})
    else:
        output.emit(
            f"{counted(len(done.removed), 'entry', 'entries')} removed, {readable_size(freed)} freed\n"
        )
    for finding in done.in_use:
        output.warn(f"{finding.path} stays: {finding.reason}")
    for finding in done.failed:
        output.warn(f"{finding.path} cannot be removed: {finding.reason}")
    if done.in_use or done.failed:
        raise typer.Exit(FOUND)


@app.command("warm")
def warm(
    targets: Annotated[
        list[str] | None,
        families_argument(
            "Families or modules. Default: every module that a built-in or your own config names.", "TARGET"
        ),
    ] = None,
    file: OutputOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Patch modules now and store them, so that later imports are fast.

    Exits with 1 if a module cannot be patched or stored.
    """
    rows = list(_warmed([module_name(target) for target in targets or ()], _settings()))
    if as_json:
        output.emit_json(rows)
    else:
        headers = ("module", "result", "stored")
        output.emit_table(headers, [[row[header] for header in headers] for row in rows])
    if any(row["result"] not in ("stored", "was stored", "no patch applies") for row in rows):
        raise typer.Exit(FOUND)


def readable_size(size: int) -> str:
    """Return a number of bytes in a readable form."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} GiB"


def _warmed(wanted: Sequence[str], settings: Settings) -> Iterator[dict[str, object]]:
    from veomni_hook.finders.prepare import prepare
    from veomni_hook.locate import locate
    from veomni_hook.tools.cli.inputs.configs import load_sources, modules_of, names

    import_from_here()
    if not wanted:
        sources = load_sources(names(settings))
        modules = modules_of(config for source in sources for config in source.configs)
        wanted = [module for module in modules if locate(module) is not None]
        output.note(
            "only modules that configs name; for others name their families: veomni-hook cache warm qwen3"
        )
        for source in sources:
            if source.error is not None:
                output.fail(source.error)
                yield {"module": source.name, "result": source.error.what, "stored": None}
    for module in output.track(wanted, "warming"):
        try:
            prepared = prepare(module, settings)
        except VeomniHookError as error:
            output.fail(error)
            yield {"module": module, "result": error.what, "stored": None}
            continue
        result = {"hit": "was stored", "miss": "stored"}.get(prepared.cache, prepared.reason)
        yield {"module": module, "result": result, "stored": prepared.stored_path}


def _settings() -> Settings:
    from veomni_hook.settings import resolve

    return resolve().settings


def _disk_store() -> Store:
    from veomni_hook.cache.store import open_store

    cache_dir = _settings().cache_dir
    store = open_store(cache_dir)
    if store.mode != "disk":
        raise CacheError(
            f"the cache folder is not used: {store.reason or 'the settings do not use a cache on disk'}",
            where=cache_dir or "the user's cache folder",
            fix="make it private (chown, chmod 700), or name another folder in VEOMNI_CACHE_DIR",
        )
    return store

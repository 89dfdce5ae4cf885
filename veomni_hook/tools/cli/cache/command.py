"""`veomni-hook cache`: show what is stored, check it, remove it, and fill it before a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.errors import CacheError, VeomniHookError
from veomni_hook.layout import counted
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import JsonOption, OutputOption, families_argument, import_from_here
from veomni_hook.tools.cli.inputs.targets import module_name
from veomni_hook.tools.cli.usage import FOUND, UsageError

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
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels",
            metavar="MODEL",
            help="Compile the kernels of this model for the GPU of this machine instead: a model type"
            " (qwen3: the default sizes of its config), or better a folder with a config.json, or the file."
            " Takes no TARGET.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            metavar="NUMBER,...",
            help="With --kernels: the lengths of sequences. Default: 4096, or as many as the model takes.",
            show_default=False,
        ),
    ] = None,
    file: OutputOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Patch modules now and store them, so that later imports are fast; or compile kernels.

    With --kernels, the model is built with random weights, with as few layers as have every structure, and
    takes a training step and an evaluation step of text, with the settings in force. What Triton compiles for
    them is then in its cache, where the first step of a training job on the same kind of GPU finds it.

    Exits with 1 if a module cannot be patched or stored.
    """
    lengths = _lengths(tokens)
    if kernels is not None:
        if targets:
            fix = "call it twice: with TARGETs, it patches and stores modules"
            raise UsageError("--kernels takes no TARGET", where="veomni-hook cache warm", fix=fix)
        _compile(kernels, lengths, as_json=as_json)
        return
    if lengths:
        fix = "name a model: --kernels qwen3"
        raise UsageError("--tokens is about --kernels", where="veomni-hook cache warm", fix=fix)
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


def _lengths(text: str | None) -> list[int]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 1 for word in words):
        fix = "write numbers above 1 with commas between them: --tokens 2048,4096"
        raise UsageError(f"--tokens {text} is no list of lengths", where="veomni-hook cache warm", fix=fix)
    return [*map(int, words)]


def _compile(name: str, lengths: Sequence[int], *, as_json: bool) -> None:
    from veomni_hook import activate
    from veomni_hook.tools.cli.cache import warming

    device = warming.gpu()
    if not _settings().enabled:
        fix = "set VEOMNI_HOOK=1"
        raise UsageError("the hook is switched off by its settings", where="veomni-hook cache warm", fix=fix)
    import_from_here()
    # What models print while they are imported must not mix with the result.
    with redirect_stdout(sys.stderr), activate():
        facts = {"model": name, **warming.compiled(warming.config_of(name), lengths, device)}
    if as_json:
        output.emit_json(facts)
        return
    output.emit_fields(
        {
            "model": facts["model"],
            "layers": [f"{few} of {all_} ({name})" for name, (few, all_) in facts["layers"].items()],
            "tokens": facts["tokens"],
            "kernels compiled": facts["compiled"],
            "kernels found": facts["found"],
            "seconds": facts["seconds"],
            "Triton's cache": facts["cache"],
        }
    )


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

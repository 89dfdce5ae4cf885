"""`veomni-hook check`: check every patch and a project's lock against the installed transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import (
    JobsOption,
    JsonOption,
    OutputOption,
    WrittenForOption,
    families_argument,
    import_from_here,
)
from veomni_hook.tools.cli.inputs.sources import source_tree
from veomni_hook.tools.cli.usage import FOUND, UsageError

if TYPE_CHECKING:
    from veomni_hook.patches.report import PatchReport
    from veomni_hook.patches.spec import PatchConfig
    from veomni_hook.settings import Settings
    from veomni_hook.tools.cli.check.lock import Comparison
    from veomni_hook.tools.cli.check.verdict import Verdict
    from veomni_hook.tools.cli.inputs.configs import Source

PLURALS = {"applies": "apply", "yields": "yield", "remark": "remarks", "FAILS": "FAIL"}
HEADERS = ("verdict", "target", "kind", "detail", "config", "device")


def check(  # noqa: PLR0913 - the options of a command
    targets: Annotated[
        list[str] | None,
        families_argument(
            "Only these families or modules. Also checks what is routed to kernels there.", "TARGET"
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="PACKAGE.MODULE[:NAME]",
            help="Also check this config. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    lock: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The lock file. Default: the nearest veomni-hook.lock in this folder or above it.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RELEASE",
            help="Judge each patch of your configs on its own against this release of transformers: a version"
            " (5.23.0; pip downloads it unless it is installed), a wheel, or a folder with the package.",
            show_default=False,
        ),
    ] = None,
    written_for: WrittenForOption = None,
    jobs: JobsOption = None,
    file: OutputOption = None,
    *,
    generated: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="Only compare this file of `dump`, or those in a folder, with what `dump` prints now. Can be"
            " repeated.",
            show_default=False,
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="With --generated: write files that differ anew.")
    ] = False,
    write_lock: Annotated[
        bool,
        typer.Option(
            "--write-lock",
            help="Write the lock: the routed places of the targets (or of the present lock, or of all"
            " families), and the upstream code that your own patches replace.",
        ),
    ] = False,
    diffs: Annotated[bool, typer.Option("--diffs", help="Also show the diffs of harmless changes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that every patch applies exactly once to the installed transformers.

    A lock file records the upstream code that a project relies on. If there is one, also show what has
    changed upstream since it was written: places that are gone or moved, compute something else or have
    another signature, with the diff.

    With --against, each patch of the configs in the settings, of plugins and of --config has one of these
    verdicts, compared with the release that its config was made for (--written-for). Nothing is patched, and
    built-in patches and the lock are left out.

    applies: upstream's code is what the patch was written for, or computes the same.

    applies, renamed: the same but for parameters that upstream says it renamed. The patch gets both names.

    moved: upstream's code of the target is another. The diff follows.

    gone: the target does not exist there. The nearest names follow.

    unnecessary: idioms route everything that the patch is for to kernels, without the patch.

    FAILS: the patch does not apply for another reason, such as a name that is no longer imported.

    With --generated, show how files that `dump` wrote differ from what the command in their header prints
    with the installed transformers and the present settings.

    Exits with 1 if a patch does not apply, or if a change can affect the project; with --against, unless
    every patch applies or is unnecessary; with --generated, if a file differs and is not written anew.
    """
    from veomni_hook.settings import resolve
    from veomni_hook.tools.cli.check.against import made_elsewhere
    from veomni_hook.tools.cli.check.generated import compare
    from veomni_hook.tools.cli.check.lock import NAME, check_place, compared, find_lock
    from veomni_hook.tools.cli.check.verdict import FAILS
    from veomni_hook.tools.cli.inputs.configs import OPTION, load_sources, names

    import_from_here()
    settings = resolve().settings
    if generated or fix:
        compare(generated or (), settings, fix=fix, as_json=as_json)
        return
    if against is not None or written_for is not None:
        _against(settings, config or (), (against, written_for), targets or (), diffs=diffs, as_json=as_json)
        return
    wanted = source_tree().files(targets) if targets else {}
    sources = load_sources([*names(settings), *((OPTION, name) for name in config or ())])
    verdicts = list(_verdicts(sources, wanted, settings))
    for line in made_elsewhere(sources):
        output.note(line)
    path = find_lock(lock) if lock is None or not write_lock else lock
    comparison = None
    if write_lock:
        if lock is None:
            check_place(path or NAME)
        _write(path or NAME, targets or (), sources, jobs)
    elif path is not None:
        comparison = compared(path, wanted, sources, jobs)
    _show(verdicts, comparison, diffs=diffs, as_json=as_json)
    for error in comparison.errors.values() if comparison is not None else ():
        output.fail(error)
    if any(verdict.verdict == FAILS for verdict in verdicts) or (comparison and comparison.matters):
        raise typer.Exit(FOUND)


def _show(verdicts: Sequence[Verdict], comparison: Comparison | None, *, diffs: bool, as_json: bool) -> None:
    if as_json:
        output.emit_json(
            [*(asdict(verdict) for verdict in verdicts), *(comparison.rows() if comparison else ())]
        )
        return
    show(verdicts)
    if comparison is not None:
        output.emit("\n")
        comparison.show(diffs=diffs)


def _against(
    settings: Settings,
    configs: Sequence[str],
    releases: tuple[str | None, str | None],
    targets: Sequence[str],
    *,
    diffs: bool,
    as_json: bool,
) -> None:
    """Judge the user's configs against a release, and exit with 1 unless every patch is fine.

    ``releases`` are the one to judge against and the one that the configs were made for.
    """
    from veomni_hook.tools.cli.check.against import judged, show
    from veomni_hook.tools.cli.inputs.configs import BUILT_IN, OPTION, load_all, names
    from veomni_hook.tools.cli.inputs.targets import module_name

    release, written = releases
    if release is None:
        fix = "name the other release too: --against RELEASE"
        raise UsageError("--written-for says what to compare with", where="the command line", fix=fix)
    named = [one for one in names(settings) if one[0] != BUILT_IN]
    sources = load_all([*named, *((OPTION, name) for name in configs)])
    configs_judged = judged(sources, release, written, [module_name(target) for target in targets])
    if as_json:
        output.emit_json([row for one in configs_judged for row in one.rows()])
    else:
        show(configs_judged, diffs=diffs)
    if not all(one.is_fine for one in configs_judged):
        raise typer.Exit(FOUND)


def _write(path: str, targets: Sequence[str], sources: Sequence[Source], jobs: int | None) -> None:
    """Rewrite the lock: for the targets, for its previous content, or for all families."""
    import os

    from veomni_hook.tools.cli.check.lock import read_lock, taken, write_lock

    families = targets or (read_lock(path).families if os.path.isfile(path) else ())
    lock, errors = taken(families, sources, jobs=jobs)
    if errors:
        raise next(iter(errors.values()))
    write_lock(path, lock)


def _verdicts(sources: Sequence[Source], wanted: Collection[str], settings: Settings) -> Iterator[Verdict]:
    from veomni_hook.finders.applicable import asks_idioms
    from veomni_hook.finders.upstream import read_upstream
    from veomni_hook.locate import locate
    from veomni_hook.tools.cli.check.verdict import failure, judge, nowhere
    from veomni_hook.tools.cli.inputs.configs import BUILT_IN, modules_of

    for source in sources:
        if source.error is not None:
            yield failure("-", source.name, source.error)
    configs = [(source, config) for source in sources for config in source.configs]
    reports: list[PatchReport] = []
    modules = list(wanted) or modules_of(config for _, config in configs)
    for module in output.track(modules, "checking"):
        fitting = [(source, config) for source, config in configs if config.applies_to(module)]
        spec = locate(module)
        upstream, reason = (None, "not installed") if spec is None else read_upstream(module, spec)
        if upstream is None:
            yield from _unreadable(module, fitting, reason, installed=spec is not None)
            continue
        verdicts, applied = judge(upstream, [c for _, c in fitting], idioms=asks_idioms(upstream, settings))
        yield from verdicts
        reports += applied
    for source, config in configs:
        of_config = [report for report in reports if config.applies_to(report.module)]
        if config.is_pattern and not wanted and (of_config or source.origin != BUILT_IN):
            yield from nowhere(config, of_config)


def _unreadable(
    module: str, fitting: Sequence[tuple[Source, PatchConfig]], reason: str, *, installed: bool
) -> Iterator[Verdict]:
    from veomni_hook.errors import ConfigError
    from veomni_hook.locate import locate
    from veomni_hook.tools.cli.check.verdict import ABSENT, Verdict, failure
    from veomni_hook.tools.cli.inputs.configs import BUILT_IN

    package = module.partition(".")[0]
    for source, config in fitting:
        if source.origin == BUILT_IN and locate(package) is None:
            continue
        if source.origin == BUILT_IN and not installed:
            detail = f"this {package} has no such module"
            yield Verdict(module, "any", config.name, "-", "-", ABSENT, detail)
        else:
            fix = "correct the config's source_module"
            yield failure(module, config.name, ConfigError(reason, where=config.origin, fix=fix))


def show(verdicts: Sequence[Verdict]) -> None:
    """Print the verdicts by module, how to fix failures, and the number of each verdict."""
    from veomni_hook.tools.cli.check.verdict import FAILS, REMARK

    for module in dict.fromkeys(verdict.module for verdict in verdicts):
        output.emit_heading(module)
        rows = [asdict(verdict) for verdict in verdicts if verdict.module == module]
        rows = [row | {"detail": "see below"} if row["verdict"] in (FAILS, REMARK) else row for row in rows]
        output.emit_table(HEADERS, [[row[header] for header in HEADERS] for row in rows])
        output.emit("\n")
    for verdict in verdicts:
        if verdict.verdict not in (FAILS, REMARK):
            continue
        place = f"{verdict.module}: {verdict.target}"
        output.emit_text(f"{verdict.verdict} {place}\n  {verdict.detail}\n  fix: {verdict.fix}\n\n")
    counts = Counter(verdict.verdict for verdict in verdicts)
    said = [
        f"{count} {verdict if count == 1 else PLURALS.get(verdict, verdict)}"
        for verdict, count in counts.items()
    ]
    none = "no patches: no setting and no plugin names a config; name one with --config PACKAGE.MODULE"
    output.emit_text((", ".join(said) or none) + "\n")

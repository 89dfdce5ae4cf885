"""The lock of `veomni-hook check`: find and write the file, and compare it with the installed release."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from veomni_hook.cache.key import engine_digest
from veomni_hook.errors import LockError, VeomniHookError
from veomni_hook.finders.build import optional_idioms
from veomni_hook.layout import counted, shortened
from veomni_hook.ownership import swap_problem
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.recognise import OPTIONAL
from veomni_hook.settings import resolve
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.configs import BUILT_IN, Source
from veomni_hook.tools.cli.inputs.sources import SourceTree, read_source, source_tree
from veomni_hook.tools.cli.inputs.targets import family_of
from veomni_hook.tools.cli.sites.survey import survey
from veomni_hook.tools.cli.usage import UsageError
from veomni_hook.tools.facts import Facts
from veomni_hook.tools.lock import (
    LINE,
    PARAMETER,
    RENAMED,
    Change,
    Lock,
    LockedModule,
    Override,
    compare,
    dumps,
    loads,
    overrides_of,
    snapshot,
)

NAME = "veomni-hook.lock"
HEADERS = ("result", "kind", "target", "detail")
FIX = "read the diff; if the project is still correct, update the lock: veomni-hook check --write-lock"


def find_lock(named: str | None) -> str | None:
    """Return the path of the lock file: the one named, or the nearest upward from the working directory.

    Raises:
        LockError: the file that was named does not exist.
    """
    if named is not None:
        if not os.path.isfile(named):
            fix = f"name another file, or write it: veomni-hook check --write-lock --lock {named}"
            raise LockError("there is no such lock file", where=named, fix=fix)
        return named
    try:
        folder = os.getcwd()
    except OSError:  # it was deleted
        return None
    while True:
        path = os.path.join(folder, NAME)
        if os.path.isfile(path):
            return path
        folder, below = os.path.dirname(folder), folder
        if folder == below:
            return None


def read_lock(path: str) -> Lock:
    """Read a lock file.

    Raises:
        LockError: it cannot be read, or is not a lock.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"the lock cannot be read: {error}", where=path, fix="make it readable") from error
    return loads(text, path)


def check_place(path: str) -> None:
    """Check that a lock file that the user did not name is not written to a place that others control.

    Raises:
        LockError: it, or a folder above it, is another user's symbolic link, or others could replace it.
    """
    if problem := swap_problem(os.path.abspath(path), what="it"):
        fix = "remove it, work in a folder of your own, or name the file: --lock FILE"
        raise LockError(f"the lock is not written: {problem}", where=path, fix=fix)


def write_lock(path: str, lock: Lock) -> None:
    """Write a lock file; modules without a site or an override are omitted.

    Raises:
        LockError: it cannot be written.
    """
    kept = {name: module for name, module in lock.modules.items() if module.sites or module.overrides}
    text = dumps(replace(lock, modules=kept))
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        fix = "name a file in a writable folder: --lock FILE"
        raise LockError(f"the lock cannot be written: {error.strerror}", where=path, fix=fix) from error
    sites = sum(len(module.sites) for module in kept.values())
    bodies = sum(len(module.overrides) for module in kept.values())
    said = f"{counted(sites, 'routed site')} and {counted(bodies, 'overridden body', 'overridden bodies')}"
    output.note(f"wrote {path}: {said} in {counted(len(kept), 'module')}")


def taken(
    families: Sequence[str],
    sources: Sequence[Source],
    *,
    old: Lock | None = None,
    wanted: Collection[str] = (),
    jobs: int | None = None,
) -> tuple[Lock, dict[str, VeomniHookError]]:
    """Record the installed state of the upstream code that a project depends on.

    Args:
        families: the families to record; empty means all of transformers.
        sources: config modules; the modules that the project's own configs patch are recorded too.
        old: a lock to compare with: its modules and definitions are recorded if they still exist.
        wanted: record only these modules.
        jobs: number of processes.

    Returns:
        The state, and the error of each module that cannot be recorded.

    Raises:
        UsageError: there is no such family, and the old lock does not have it either.
    """
    tree = source_tree()
    files = tree.files(families) if old is None or not families else {}
    for name in (*families, *old.modules) if old is not None else ():
        files |= _there(tree, name)
    overrides = _overrides(tree, sources, files)
    files = {module: files[module] for module in sorted(files) if not wanted or module in wanted}
    known = {
        name: {target: body.fingerprint for target, body in module.bodies.items()}
        for name, module in (old.modules if old is not None else {}).items()
    }
    settings = resolve().settings
    ops = {site.op for module in old.modules.values() for site in module.sites} if old else set()
    # What the lock has is compared whatever the settings are now.
    optional = {name for name in OPTIONAL if name.partition(".")[0] in ops} | {*optional_idioms(settings)}
    work = partial(
        _snapshot, overrides=overrides, known=known, idioms=settings.idioms, optional=sorted(optional)
    )
    modules: dict[str, LockedModule] = {}
    errors: dict[str, VeomniHookError] = {}
    for name, recorded in zip(files, survey(work, files, "recording", jobs=jobs), strict=True):
        if isinstance(recorded, VeomniHookError):
            errors[name] = recorded
        else:
            modules[name] = recorded
    return Lock(tree.version, engine_digest(), tuple(sorted(families)), modules), errors


@dataclass(frozen=True)
class Comparison:
    """What changed since a lock was written.

    Attributes:
        path: the lock file.
        old: its content.
        new: the installed state.
        changes: the differences.
        errors: the errors of modules that could not be compared, by name.
    """

    path: str
    old: Lock
    new: Lock
    changes: Sequence[Change]
    errors: Mapping[str, VeomniHookError]

    @property
    def matters(self) -> bool:
        """Whether a person must look at it."""
        return bool(self.errors) or any(change.matters for change in self.changes)

    def rows(self) -> list[Facts]:
        """Return the changes as `check --json` shows them: the fields of a verdict, `matters` and `diff`."""
        rows = []
        for change in self.changes:
            fields = asdict(change)
            fields["verdict"] = fields.pop("result")
            fields["diff"] = "".join(fields.pop("diffs"))
            del fields["lines"]  # the diff has them
            fix = FIX if change.matters else ""
            rows.append({"device": "any", "config": os.path.basename(self.path), "fix": fix, **fields})
        return rows

    def show(self, *, diffs: bool) -> None:
        """Print the changes; with ``diffs``, also print the diffs of those that do not matter."""
        releases = f"transformers {self.old.transformers}, now {self.new.transformers}"
        output.emit_heading(f"{os.path.basename(self.path)} ({releases})")
        rows = [change for change in self.changes if change.result != LINE]
        rows.sort(key=lambda change: (not change.matters, change.kind != PARAMETER))
        if rows:
            output.emit_table(HEADERS, _cells(rows))
        shown: set[str] = set()  # several sites may use one definition
        for change in rows:
            if change.diff and (change.matters or diffs):
                output.emit_heading(f"\n{change.result}: {change.module}: {change.target}")
                fresh = [diff for diff in change.diffs if diff not in shown]
                output.emit_code("".join(fresh) or "shown above\n", "diff")
                shown.update(fresh)
        counts = Counter(change.result for change in self.changes)
        recorded = sum(len(module.sites) + len(module.overrides) for module in self.old.modules.values())
        said = [f"{recorded} recorded", *(f"{count} {result}" for result, count in counts.items())]
        output.emit_text(("\n" if rows else "") + ", ".join(said) + "\n")
        if any(change.matters for change in self.changes):
            output.emit_text(f"fix: {FIX}\n")


def _cells(changes: Sequence[Change]) -> list[tuple[str, str, str, str]]:
    """The rows of the table: one for harmless changes that are alike, and one for each other change."""
    groups: dict[object, list[Change]] = {}
    for number, change in enumerate(changes):
        alike = (
            (change.result, change.detail, change.lines) if change.lines and not change.matters else number
        )
        groups.setdefault(alike, []).append(change)
    cells = []
    for group in groups.values():
        kinds = ", ".join(dict.fromkeys(change.kind for change in group))
        places = [*dict.fromkeys(map(_place, group))]
        cells.append((group[0].result, kinds, shortened(places, 1), group[0].detail))
    return cells


def _place(change: Change) -> str:
    # A renamed parameter has no place of its own: its row counts them.
    if change.result == RENAMED and change.kind == PARAMETER:
        return change.target
    return f"{family_of(change.module)}: {change.target}"


def compared(
    path: str, wanted: Collection[str], sources: Sequence[Source], jobs: int | None = None
) -> Comparison:
    """Compare a lock with the installed transformers and the configs in force.

    If idioms are disabled, the lock's routed sites are skipped: nothing depends on them.

    Args:
        path: the lock file.
        wanted: only these modules; by default all that the lock names.
        sources: config modules.
        jobs: number of processes.

    Raises:
        LockError: the file cannot be read.
    """
    old = read_lock(path)
    if not resolve().settings.idioms:
        old = replace(old, modules={name: replace(module, sites=()) for name, module in old.modules.items()})
    new, errors = taken(old.families, sources, old=old, wanted=wanted, jobs=jobs)
    asked = {name: module for name, module in old.modules.items() if not wanted or name in wanted}
    kept = {name: module for name, module in asked.items() if name not in errors}
    return Comparison(path, old, new, compare(replace(old, modules=kept), new), errors)


def _there(tree: SourceTree, name: str) -> dict[str, str]:
    """The files of a family or a module; none if it is gone since the lock was written."""
    try:
        return tree.files([name])
    except UsageError:
        return {}


def _overrides(
    tree: SourceTree, sources: Sequence[Source], files: dict[str, str]
) -> dict[str, tuple[Override, ...]]:
    """Return what the project's own configs override, by module; those modules are added to ``files``."""
    configs = [c for source in sources if source.origin != BUILT_IN for c in source.configs]
    named: dict[str, str] = {}
    for config in configs:
        if config.is_pattern:
            named |= {
                module: path
                for module, path in (tree.files() | tree.beside()).items()
                if config.applies_to(module)
            }
        else:
            named |= _there(tree, config.source_module)
    files.update(named)
    # Not in a worker process: configs hold functions of the user's modules.
    return {
        module: overrides_of(configs, Document(read_source(path), module)) for module, path in named.items()
    }


def _snapshot(
    module: str,
    text: str,
    *,
    overrides: Mapping[str, Sequence[Override]],
    known: Mapping[str, Mapping[str, str]],
    idioms: bool,
    optional: Sequence[str],
) -> LockedModule | VeomniHookError:
    try:
        own, before = overrides.get(module, ()), known.get(module, {})
        return snapshot(module, text, overrides=own, known=before, idioms=idioms, optional=optional)
    except VeomniHookError as error:
        return error
    except SyntaxError as error:
        fix = "reinstall transformers, or run a Python that can parse it"
        return VeomniHookError(f"{module} cannot be parsed: {error}", where=module, fix=fix)

"""Plugins: what installed distributions announce by entry point, and which of it is in force.

Whoever installs a distribution need not know that it announces something. So the setting `plugins` switches
them off, and one that cannot be loaded is left out, alone, with a warning that names the distribution (in
strict mode it is an error).
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint

    from veomni_hook.errors import VeomniHookError

__all__ = [
    "ALL",
    "KERNELS",
    "NAMES_FIX",
    "NONE",
    "PATCHES",
    "announced",
    "choose",
    "described",
    "distribution",
    "give_up",
    "in_force",
    "note_failure",
    "remedy",
    "state_of",
    "unknown_names",
    "unreadable",
]

#: Config modules: `veomni_hook.finders.configs` loads them.
PATCHES = "veomni_hook.patches"
#: Kernels: `veomni_hook.kernels.registry` loads them.
KERNELS = "veomni_hook.kernels"
#: Values of the setting `plugins` besides names.
ALL, NONE = "all", "none"
#: What to do about a name in the setting that nothing has.
NAMES_FIX = "`veomni-hook doctor` lists the names"


class _State:
    """What this process chose, and what failed in it; replaced whole, so that threads need no lock."""

    def __init__(self) -> None:
        self.installed: tuple[EntryPoint, ...] | None = None
        self.broken: dict[str, str] = {}
        self.chosen: str | None = None
        self.strict = False
        self.failed: dict[EntryPoint, str] = {}
        self.found: dict[tuple[str, str], tuple[EntryPoint, ...]] = {}


_STATE = _State()


def choose(setting: str, *, strict: bool) -> None:
    """Set what is in force for who asks without naming a setting (kernels do)."""
    _STATE.chosen, _STATE.strict = setting, strict


def announced(group: str) -> tuple[EntryPoint, ...]:
    """Every installed entry point of ``group``, in force or not, in the order of what they name."""
    if _STATE.installed is None:
        # Reading every distribution's entry points costs milliseconds; they cannot change under a process.
        _STATE.installed = tuple(sorted(_installed(), key=lambda point: (point.value, point.name)))
    return tuple(point for point in _STATE.installed if point.group == group)


def in_force(group: str, setting: str | None = None) -> tuple[EntryPoint, ...]:
    """The entry points of ``group`` that a setting (by default this process's) lets through and that work.

    The same tuple until something changes.
    """
    setting = _setting() if setting is None else setting
    if setting == NONE:
        return ()
    found = _STATE.found.get((group, setting))
    if found is None:
        found = tuple(point for point in announced(group) if not state_of(point, setting))
        _STATE.found[group, setting] = found
    return found


def state_of(point: EntryPoint, setting: str) -> str:
    """Why an entry point is not in force; empty where it is."""
    if setting != ALL and not _names(point) & _normalised(setting):
        return "switched off"
    reason = _STATE.failed.get(point)
    return f"failed: {reason}" if reason else ""


def give_up(point: EntryPoint, error: VeomniHookError, *, strict: bool | None = None) -> None:
    """Take a plugin that fails out of force in this process, and warn.

    Raises:
        VeomniHookError: in strict mode, the error itself.
    """
    if _STATE.strict if strict is None else strict:
        raise error
    if point in _STATE.failed:
        return
    note_failure(point, error.what)
    _warn(f"{described(point)} is left out of this process: {error.what}. Fix: {remedy(point)}")


def note_failure(point: EntryPoint, reason: str) -> None:
    """Take a plugin that fails out of force in this process."""
    _STATE.failed = {**_STATE.failed, point: reason}
    _STATE.found = {}


def described(point: EntryPoint) -> str:
    """An entry point with its distribution, for messages."""
    return f"entry point {point.name!r} of {distribution(point) or 'a distribution'} ({point.group})"


def remedy(point: EntryPoint) -> str:
    """What to do about a plugin that fails."""
    name = distribution(point) or "the distribution"
    return f"update or uninstall {name}, or leave it out: VEOMNI_PLUGINS=0, or the names of those to keep"


def unknown_names(setting: str) -> tuple[str, ...]:
    """The names in a setting that no installed plugin has."""
    if setting in (ALL, NONE):
        return ()
    known = {name for group in (PATCHES, KERNELS) for point in announced(group) for name in _names(point)}
    return tuple(sorted(_normalised(setting) - known))


def unreadable() -> dict[str, str]:
    """Distributions whose entry points cannot be read, with the reasons."""
    announced(PATCHES)
    return _STATE.broken


def _warn(message: str) -> None:
    import warnings

    from veomni_hook.errors import VeomniHookWarning

    warnings.warn(message, VeomniHookWarning, stacklevel=3)


def _setting() -> str:
    if _STATE.chosen is None:  # nothing is active: what would be chosen here
        from veomni_hook.settings import resolve

        settings = resolve().settings
        choose(settings.plugins, strict=settings.strict)
    return _STATE.chosen or ALL


def _installed() -> Iterator[EntryPoint]:
    from importlib.metadata import entry_points

    try:
        found = entry_points()
    except Exception:  # one distribution's list cannot be read, and it takes all others with it
        yield from _installed_one_by_one()
        return
    for group in (PATCHES, KERNELS):
        yield from found.select(group=group)


def _installed_one_by_one() -> Iterator[EntryPoint]:
    from importlib.metadata import distributions

    seen: set[str] = set()
    for distribution in distributions():
        name = str(distribution.metadata["Name"] or distribution)
        if _normal(name) in seen:  # further down on sys.path, so hidden
            continue
        seen.add(_normal(name))
        try:
            points = [point for point in distribution.entry_points if point.group in (PATCHES, KERNELS)]
        except Exception as error:
            _STATE.broken[name] = f"{type(error).__name__}: {error}"
            _warn(f"the entry points of {name} cannot be read, so none of them is in force: {error}")
            continue
        yield from points


def distribution(point: EntryPoint) -> str:
    """The name of the distribution that announces an entry point."""
    return point.dist.name if point.dist is not None else ""


def _names(point: EntryPoint) -> set[str]:
    return {_normal(point.name), _normal(distribution(point))}


def _normalised(setting: str) -> set[str]:
    return {_normal(name) for name in setting.split(",")} if setting not in (ALL, NONE) else set()


def _normal(name: str) -> str:
    """A distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()

"""Plugins: the entry points of installed distributions, and which of them are enabled.

Users may not know that a distribution they installed has such entry points. So the setting `plugins` can
disable them, and a plugin that cannot be loaded is skipped on its own, with a warning that names the
distribution (in strict mode, an error).
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.settings import ALL, NONE, resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint

    from veomni_hook.errors import VeomniHookError

__all__ = [
    "KERNELS",
    "NAMES_FIX",
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
#: Kernels: `veomni_hook.kernels.selection.registry` loads them.
KERNELS = "veomni_hook.kernels"
#: The fix for a name in the setting that matches no plugin.
NAMES_FIX = "`veomni-hook doctor` lists the names"


@dataclass
class _State:
    """This process's choice and failures; values are replaced, not mutated, so threads need no lock."""

    installed: tuple[EntryPoint, ...] | None = None
    broken: dict[str, str] = field(default_factory=dict)
    chosen: str | None = None
    strict: bool = False
    failed: dict[EntryPoint, str] = field(default_factory=dict)
    working: dict[tuple[str, str], tuple[EntryPoint, ...]] = field(default_factory=dict)


_STATE = _State()


def choose(setting: str, *, strict: bool) -> None:
    """Set which plugins callers get that pass no setting (kernels do this)."""
    _STATE.chosen, _STATE.strict = setting, strict


def announced(group: str) -> tuple[EntryPoint, ...]:
    """Return every installed entry point of ``group``, enabled or not, sorted by value and name."""
    if _STATE.installed is None:
        # Reading every distribution's entry points takes milliseconds, and they do not change at run time.
        _STATE.installed = tuple(sorted(_installed(), key=lambda point: (point.value, point.name)))
    return tuple(point for point in _STATE.installed if point.group == group)


def in_force(group: str, setting: str | None = None) -> tuple[EntryPoint, ...]:
    """Return the working entry points of ``group`` that a setting (default: this process's) enables.

    Returns the same tuple until something changes.
    """
    setting = _setting() if setting is None else setting
    if setting == NONE:
        return ()
    points = _STATE.working.get((group, setting))
    if points is None:
        points = tuple(point for point in announced(group) if not state_of(point, setting))
        _STATE.working[group, setting] = points
    return points


def state_of(point: EntryPoint, setting: str) -> str:
    """Return why an entry point is not enabled, or empty."""
    if setting != ALL and not _names(point) & _normalised(setting):
        return "switched off"
    reason = _STATE.failed.get(point)
    return f"failed: {reason}" if reason else ""


def give_up(point: EntryPoint, error: VeomniHookError, *, strict: bool | None = None) -> None:
    """Disable a failing plugin in this process, and warn.

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
    """Disable a failing plugin in this process."""
    _STATE.failed = {**_STATE.failed, point: reason}
    _STATE.working = {}


def described(point: EntryPoint) -> str:
    """Return the name of an entry point and its distribution, for messages."""
    return f"entry point {point.name!r} of {distribution(point) or 'a distribution'} ({point.group})"


def remedy(point: EntryPoint) -> str:
    """Return what to do about a failing plugin."""
    name = distribution(point) or "the distribution"
    return f"update or uninstall {name}, or leave it out: VEOMNI_PLUGINS=0, or the names of those to keep"


def unknown_names(setting: str) -> tuple[str, ...]:
    """Return the names in a setting that match no installed plugin."""
    if setting in (ALL, NONE):
        return ()
    known = {name for group in (PATCHES, KERNELS) for point in announced(group) for name in _names(point)}
    return tuple(sorted(_normalised(setting) - known))


def unreadable() -> dict[str, str]:
    """Return the distributions whose entry points cannot be read, with the reasons."""
    announced(PATCHES)
    return _STATE.broken


def _warn(message: str) -> None:
    warnings.warn(message, VeomniHookWarning, stacklevel=3)


def _setting() -> str:
    if _STATE.chosen is None:  # nothing is active: use what activation would choose here
        settings = resolve().settings
        choose(settings.plugins, strict=settings.strict)
    return _STATE.chosen or ALL


def _installed() -> Iterator[EntryPoint]:
    from importlib.metadata import entry_points  # not where the setting switches plugins off

    try:
        points = entry_points()
    except Exception:  # one unreadable distribution makes the whole call fail
        yield from _installed_one_by_one()
        return
    for group in (PATCHES, KERNELS):
        yield from points.select(group=group)


def _installed_one_by_one() -> Iterator[EntryPoint]:
    from importlib.metadata import distributions

    seen: set[str] = set()
    for distribution in distributions():
        name = str(distribution.metadata["Name"] or distribution)
        if _normal(name) in seen:  # shadowed by an earlier one on sys.path
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
    """Return the name of an entry point's distribution, or empty."""
    return point.dist.name if point.dist is not None else ""


def _names(point: EntryPoint) -> set[str]:
    return {_normal(point.name), _normal(distribution(point))}


def _normalised(setting: str) -> set[str]:
    return {_normal(name) for name in setting.split(",")} if setting not in (ALL, NONE) else set()


def _normal(name: str) -> str:
    """Return a distribution's name in the normalised form of the package index."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()

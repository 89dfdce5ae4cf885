"""Activation as a handle: `activate(...)` puts the finder on `sys.meta_path`, the handle removes it.

`import veomni_hook.install` loads this module, so anything not needed to install the finder is imported
where it is used.
"""

from __future__ import annotations

import os
import sys

from veomni_hook.finders.finder import REMOTE_LOADING, PatchFinder, is_remote, is_target
from veomni_hook.finders.state import STATE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType, TracebackType
    from typing import Any

    from veomni_hook.finders.outcome import Outcome
    from veomni_hook.patches.spec import PatchConfig
    from veomni_hook.settings import Settings


class Handle:
    """One activation of the hook; a context manager.

    Attributes:
        overrides: the settings given to `activate`.
    """

    def __init__(self, overrides: dict[str, Any]) -> None:
        self.overrides = overrides

    def deactivate(self) -> None:
        """Undo this activation; calling it twice is harmless.

        When no other activation remains, the finder is removed from `sys.meta_path`, and every slot in
        modules that are already patched falls back to upstream code. Loaded modules stay loaded. Changes to
        the environment for child processes are undone.
        """
        if self not in STATE.handles:
            return
        STATE.handles.remove(self)
        STATE.resolved = STATE.store = None
        if not STATE.handles and STATE.finder in sys.meta_path:
            sys.meta_path.remove(STATE.finder)
        _share_with_children()
        bind_slots()

    def status(self) -> Status:
        """Return whether this activation is in force, and the outcome of each target module so far."""
        return Status(self in STATE.handles, {**STATE.outcomes, **_passed_by()})

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deactivate()

    def __repr__(self) -> str:
        return f"<veomni_hook Handle, {'active' if self in STATE.handles else 'inactive'}>"


class Status:
    """What `Handle.status()` returns.

    Attributes:
        active: whether the handle's activation is in force.
        modules: the outcome of every target module that was imported or looked for, by name.
    """

    def __init__(self, active: bool, modules: dict[str, Outcome]) -> None:  # noqa: FBT001
        self.active = active
        self.modules = modules

    def to_dict(self) -> dict[str, Any]:
        """Return both fields as JSON-ready values."""
        return {"active": self.active, "modules": {n: o.to_dict() for n, o in self.modules.items()}}

    def __repr__(self) -> str:
        lines = [f"veomni_hook: {'active' if self.active else 'inactive'}"]
        for outcome in self.modules.values():
            lines.append(f"  {outcome.module}: {outcome.state}")
        return "\n".join(lines)


def activate(**settings: Any) -> Handle:
    """Patch transformers' modeling modules from now on, as they are imported.

    Args:
        **settings: fields of `veomni_hook.settings.Settings`; they override environment and settings file.

    Returns:
        A handle that undoes the activation. If `VEOMNI_HOOK=0` is set and `enabled=True` is not given, the
        handle is inactive from the start.

    Raises:
        SettingsError: a setting is unknown or invalid (values from files and environment are checked at the
            first target module).
        AlreadyImportedError: under `VEOMNI_STRICT=1`, a module with patches is already imported.
    """
    try:
        return _activate(settings, early=True)
    except BaseException as error:
        from veomni_hook.finders.tracebacks import fold

        if not fold(error):
            raise
        raise error  # VEOMNI_TRACEBACK=full shows the frames of veomni_hook, too


def activate_late(**settings: Any) -> Handle:
    """Activate for models that are already loaded, without warnings about modules imported before."""
    return _activate(settings, early=False)


def _activate(settings: dict[str, Any], *, early: bool) -> Handle:
    handle = Handle(settings)
    if settings:
        from veomni_hook.settings import resolve

        resolve(environ={}, overrides=settings)
    refused = os.environ.get("VEOMNI_HOOK", "").lower() in ("0", "false", "no", "off")
    if not settings.get("enabled", not refused):
        return handle
    if STATE.finder is None:
        STATE.finder = PatchFinder()
    STATE.handles.append(handle)
    STATE.resolved = STATE.store = None
    if STATE.finder not in sys.meta_path:
        sys.meta_path.insert(0, STATE.finder)
    try:
        _share_with_children()
        bind_slots()
        if "transformers" in sys.modules:
            _note_early_imports(report=early)
    except BaseException:
        handle.deactivate()
        raise
    return handle


def register(config: PatchConfig | ModuleType | Any) -> PatchConfig:
    """Add a patch config to this process; it applies to modules imported from now on.

    Args:
        config: a `PatchConfig` (ours or patchgen's), or a module that holds one as `config`.

    Returns:
        The config as the engine uses it.

    Raises:
        ConfigError: the object is not a patch config and holds none. Under `VEOMNI_STRICT=1` also if the
            config's source module is not installed, which is otherwise a warning.
        AlreadyImportedError: under `VEOMNI_STRICT=1`, the config's source module is already imported.
    """
    from veomni_hook.finders import early, installed
    from veomni_hook.finders.configs import as_configs

    found = as_configs(config, where=repr(config))
    installed.report([(each.name, each.source_module) for each in found], registered=True)
    STATE.registered = [*STATE.registered, *found]
    if STATE.finder is None:
        STATE.finder = PatchFinder()
    others = [c for c in found if not is_target(c.source_module)]
    STATE.finder.registered |= {c.source_module for c in others if not c.is_pattern}
    STATE.finder.patterns += tuple(c.applies_to for c in others if c.is_pattern)
    early.report(early.modules_of(found))
    return found[0]


def current_settings() -> Settings:
    """The settings in force: resolved once per activation, at the first call."""
    if STATE.resolved is None:
        from veomni_hook.settings import resolve

        overrides: dict[str, Any] = {}
        for handle in STATE.handles:
            overrides.update(handle.overrides)
        resolved = resolve(overrides=overrides)
        _choose_plugins(resolved.settings)
        if resolved.unknown_environment:
            from veomni_hook.finders import variables

            variables.report(resolved.unknown_environment, strict=resolved.settings.strict)
        STATE.resolved = resolved
    return STATE.resolved.settings


def _share_with_children() -> None:
    """Add the hook to the environment while an activation asks for it, with the settings in force.

    Raises:
        SettingsError: the setting that asks for it is invalid.
    """
    if STATE.inherited is None and not (STATE.handles and _children_are_asked_for()):
        return
    from veomni_hook.finders import children

    if STATE.inherited is not None:
        # First, so that our own variables are not mistaken for the user's.
        children.take_out(STATE.inherited)
        STATE.inherited = None
    if STATE.handles and _children_are_asked_for():
        settings = current_settings()
        if settings.children and settings.enabled:
            STATE.inherited = children.put(settings)


def _children_are_asked_for() -> bool:
    """Whether the settings must be resolved to decide if children inherit the hook."""
    if any("children" in handle.overrides for handle in STATE.handles):
        return True
    if not (os.environ.get("VEOMNI_CHILDREN") or _a_file_mentions_children()):
        return False
    from veomni_hook.finders.children import is_inherited

    return any(handle.overrides for handle in STATE.handles) or not is_inherited()


def _a_file_mentions_children() -> bool:
    # Only resolving the settings (10 ms) tells whether one of our settings files asks for it.
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # the working directory was deleted
        return False
    while True:
        for name in ("veomni-hook.toml", "pyproject.toml"):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and _mentions(path, b"children"):
                return True
        if folder == (folder := os.path.dirname(folder)):
            return False


def _mentions(path: str, word: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return word in file.read()
    except OSError:
        return False


def _choose_plugins(settings: Settings) -> None:
    from veomni_hook import plugins

    plugins.choose(settings.plugins, strict=settings.strict)
    for name in plugins.unknown_names(settings.plugins):
        what = (
            f"the setting `plugins` names {name}, but no installed distribution or entry point has that name"
        )
        if settings.strict:
            from veomni_hook.errors import SettingsError

            raise SettingsError(what, where="VEOMNI_PLUGINS or the settings file", fix=plugins.NAMES_FIX)
        from veomni_hook.finders.log import warn

        warn(f"{what}. Fix: {plugins.NAMES_FIX}")


def bind_slots() -> None:
    """Pass the settings in force to the slots of loaded modules; does nothing before any is loaded.

    Raises:
        KernelError: the kernel choice names an unknown op or backend.
    """
    if "veomni_hook.kernels.selection.process_choice" not in sys.modules:
        return
    from veomni_hook.kernels.selection import process_choice

    if STATE.handles:
        process_choice.STATE.asked = _first_asked
        process_choice.set_choice(current_settings().kernels)
    process_choice.set_active(active=bool(STATE.handles))


def _first_asked(module: str, device: str | None, compiled: bool) -> None:  # noqa: FBT001
    """Called by slots when a patched module's kernels are chosen: at its first calls."""
    if module not in STATE.announced:
        from veomni_hook.finders import banner

        banner.kernels_are_chosen(module, device, compiled=compiled)


def _passed_by() -> dict[str, Outcome]:
    """Loaded targets that bypassed the finder: imported too early, or taken by a finder ahead of ours."""
    from veomni_hook.finders.outcome import Outcome
    from veomni_hook.finders.passed_by import ahead_of

    remote = current_settings().remote_code
    names = [
        name
        for name in list(sys.modules)
        if name not in STATE.asked
        and (remote if is_remote(name) or name == REMOTE_LOADING else is_target(name))
    ]
    ahead = ", ".join(ahead_of(STATE.finder))
    reason = "imported before the hook was active"
    if ahead:
        reason += f", or taken by a finder ahead of it on sys.meta_path ({ahead})"
    adopted = "; veomni_hook.adopt has patched models of it"
    return {
        name: Outcome(name, patched=False, reason=reason + (adopted if name in STATE.adopted else ""))
        for name in names
    }


def _note_early_imports(*, report: bool) -> None:
    loaded = [name for name in list(sys.modules) if is_target(name) or is_remote(name)]
    if len(STATE.handles) == 1:
        STATE.early = frozenset(loaded)
    if loaded and report:
        from veomni_hook.finders import early

        early.report(early.affected())

"""Activation as a handle: `activate(...)` puts the finder on `sys.meta_path`, the handle removes it.

`import veomni_hook.install` loads this module, so functions here import what is not needed to install the
finder.
"""

from __future__ import annotations

import os
import sys

from veomni_hook.finders.finder import PatchFinder
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import is_remote, is_target, is_target_if_named

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from veomni_hook.finders.outcome import Status

__all__ = ["Handle", "activate", "activate_late"]


class Handle:
    """One activation of the hook; a context manager.

    Attributes:
        overrides: the settings given to `activate`.
    """

    def __init__(self, overrides: dict[str, object]) -> None:
        self.overrides = overrides

    def deactivate(self) -> None:
        """Undo this activation; calling it twice is harmless.

        When no other activation remains, the finder is removed from `sys.meta_path`, and every slot in
        modules that are already patched falls back to upstream code. Loaded modules stay loaded. Changes to
        the environment for child processes are undone.
        """
        if self not in STATE.handles:
            return
        del STATE.handles[self]
        STATE.resolved = STATE.store = STATE.named = None
        if not STATE.handles and STATE.finder in sys.meta_path:
            sys.meta_path.remove(STATE.finder)
        _share_with_children()
        _bind_slots()

    def status(self) -> Status:
        """Return whether this activation is in force, and the outcome of each target module so far."""
        from veomni_hook.finders.bypassed import outcomes
        from veomni_hook.finders.outcome import Status

        return Status(self in STATE.handles, {**STATE.outcomes, **outcomes()})

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deactivate()

    def __repr__(self) -> str:
        return f"<veomni_hook Handle, {'active' if self in STATE.handles else 'inactive'}>"


def activate(**settings: object) -> Handle:
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
        return _activate(settings, late=False)
    except BaseException as error:
        from veomni_hook.finders.tracebacks import fold

        if not fold(error):
            raise
        raise error  # VEOMNI_TRACEBACK=full shows the frames of veomni_hook, too


def activate_late(**settings: object) -> Handle:
    """Activate for models that are already loaded, without warnings about modules imported before."""
    return _activate(settings, late=True)


def _activate(settings: dict[str, object], *, late: bool) -> Handle:
    handle = Handle(settings)
    if settings:
        from veomni_hook.settings import resolve

        resolve(environ={}, overrides=settings)
    refused = os.environ.get("VEOMNI_HOOK", "").lower() in ("0", "false", "no", "off")
    if not settings.get("enabled", not refused):
        return handle
    if STATE.finder is None:
        STATE.finder = PatchFinder()
    STATE.handles[handle] = settings
    STATE.resolved = STATE.store = STATE.named = None
    if STATE.finder not in sys.meta_path:
        sys.meta_path.insert(0, STATE.finder)
    try:
        _share_with_children()
        _bind_slots()
        if "transformers" in sys.modules:
            _note_early_imports(report=not late)
    except BaseException:
        handle.deactivate()
        raise
    return handle


def _share_with_children() -> None:
    """Add the hook to the environment while an activation asks for it, with the settings in force.

    Raises:
        SettingsError: the setting that asks for it is invalid.
    """
    if STATE.inherited is not None:
        from veomni_hook.finders.children import take_out

        # First, so that our own variables are not mistaken for the user's.
        take_out(STATE.inherited, os.environ)
        STATE.inherited = None
    if STATE.handles and _children_are_asked_for():
        from veomni_hook.finders.children import put
        from veomni_hook.finders.settings_in_force import current_settings

        settings = current_settings()
        if settings.children and settings.enabled:
            STATE.inherited = put(settings, os.environ)


def _children_are_asked_for() -> bool:
    """Whether the settings must be resolved to decide if children inherit the hook."""
    if any("children" in settings for settings in STATE.handles.values()):
        return True
    if not (os.environ.get("VEOMNI_CHILDREN") or _a_file_mentions_children()):
        return False
    from veomni_hook.finders.children import is_inherited

    return any(STATE.handles.values()) or not is_inherited(os.environ)


def _a_file_mentions_children() -> bool:
    # Only resolving the settings (10 ms) tells whether one of our settings files asks for it.
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # the working directory was deleted
        return False
    while True:
        for name in ("veomni-hook.toml", "pyproject.toml"):
            path = os.path.join(folder, name)
            try:
                if os.path.isfile(path):
                    with open(path, "rb") as file:
                        if b"children" in file.read():
                            return True
            except OSError:
                continue
        if folder == (folder := os.path.dirname(folder)):
            return False


def _bind_slots() -> None:
    if "veomni_hook.patches.mapped" in sys.modules:
        from veomni_hook.patches.mapped import set_active

        set_active(active=bool(STATE.handles))
    # Otherwise there is no slot yet; `data_shard` of a plain loop may be asked before any model is imported.
    asked = any("parallel" in settings for settings in STATE.handles.values())
    if asked or "veomni_hook.kernels.selection.process_choice" in sys.modules:
        from veomni_hook.finders.slots import bind_slots

        bind_slots()


def _note_early_imports(*, report: bool) -> None:
    kinds = (is_target, is_target_if_named, is_remote)
    loaded = [name for name in list(sys.modules) if any(is_one(name) for is_one in kinds)]
    if len(STATE.handles) == 1:
        STATE.already_imported = frozenset(loaded)
    if loaded and report:
        from veomni_hook.finders import already_imported, bypassed

        already_imported.report_used(bypassed.imported_before())

"""Modules that were imported before the hook was active: a warning with the remedy; an error if strict."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from veomni_hook.errors import AlreadyImportedError, AlreadyImportedWarning
from veomni_hook.finders.loader import PatchedLoader
from veomni_hook.finders.log import note
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import LAYERS, PREFIX, SHARED, TRAINING
from veomni_hook.layout import shortened

if TYPE_CHECKING:
    from veomni_hook.patches.spec import PatchConfig

_IN_A_SCRIPT = (
    "put `import veomni_hook.install` (or register the config) above the first import of transformers, "
    "or start the script with `veomni-hook run`; for a model that is loaded call `veomni_hook.adopt(model)`"
)
_IN_A_NOTEBOOK = (
    "restart the kernel and run `import veomni_hook.install` (or register the config) first, in a cell above "
    "the first import of transformers; for a model that is loaded call `veomni_hook.adopt(model)`"
)


def is_patched(module: ModuleType) -> bool:
    """Whether this module runs patched source."""
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return isinstance(getattr(loader, "patched", loader), PatchedLoader)


def modules_of(configs: Iterable[PatchConfig]) -> list[str]:
    """Names of the modules that configs are for; for a pattern, only the loaded modules."""
    names: dict[str, None] = {}
    for config in configs:
        matching = (
            filter(config.applies_to, list(sys.modules)) if config.is_pattern else [config.source_module]
        )
        names.update(dict.fromkeys(matching))
    return list(names)


def report(names: Iterable[str]) -> None:
    """Warn about the named modules that are in `sys.modules` but not patched.

    The warning names their families, and what all models lose by those that models share; the log (INFO) has
    all modules with their files.

    Raises:
        AlreadyImportedError: in strict mode.
    """
    loaded = [
        name
        for name in dict.fromkeys(names)
        if name not in STATE.taken and name not in STATE.unsettled  # they were not imported too early
        if isinstance(sys.modules.get(name), ModuleType) and not is_patched(sys.modules[name])
    ]
    if not loaded:
        return
    files = ", ".join(f"{name} ({getattr(sys.modules[name], '__file__', None)})" for name in loaded)
    note(f"imported too early to be patched: {files}")
    what = _lost(loaded)
    # ipykernel, which Colab's kernel builds on, runs notebooks.
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if ask is None else ask()
    is_notebook = any(base.__module__.partition(".")[0] == "ipykernel" for base in type(shell).__mro__)
    fix = _IN_A_NOTEBOOK if is_notebook else _IN_A_SCRIPT
    if current_settings().strict:
        raise AlreadyImportedError(what, where="sys.modules", fix=fix)
    everything = ". `handle.status()` lists all modules" if STATE.handles else ""
    warnings.warn(f"{what}{everything}. Fix: {fix}", AlreadyImportedWarning, stacklevel=4)


def _lost(loaded: Sequence[str]) -> str:
    """What users lose because of modules that are not patched."""
    shared = SHARED | LAYERS | TRAINING
    losses = dict.fromkeys(loss for name in loaded for loss in shared.get(name, ()))
    told = []
    if own := families(name for name in loaded if name not in shared):
        told.append(f"imported too early to be patched: {shortened(own)}. They stay unpatched")
    if losses:
        libraries = " and ".join(dict.fromkeys(name.partition(".")[0] for name in loaded if name in shared))
        told.append(f"{libraries} imported too early. Models lose: {'; '.join(losses)}")
    return ". ".join(told)


def families(names: Iterable[str]) -> list[str]:
    """Return the families of modules, then the modules that belong to none."""
    ordered = sorted(names, key=lambda name: not name.startswith(PREFIX))
    return list(
        dict.fromkeys(
            name.removeprefix(PREFIX).partition(".")[0] if name.startswith(PREFIX) else name
            for name in ordered
        )
    )

"""Modules that were imported before the hook was active: a warning with the remedy; an error if strict.

Libraries import modeling modules for a function alone, as PEFT does, and no model misses a patch there. So
the warning comes when a class of the module is used: at once if such a module object exists, else when the
first is made. torch tells of every module object that becomes part of another; no class is changed.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

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


def report_used(names: Iterable[str]) -> None:
    """Report unpatched modules, those with unused classes of module objects when one of these is used.

    Raises:
        AlreadyImportedError: in strict mode, now or when the first module object is made.
    """
    names = list(names)
    waiting = set()
    for name in {*names} - SHARED.keys() - TRAINING.keys():
        kinds = [kind for kind in list(vars(sys.modules[name]).values()) if isinstance(kind, type)]
        if any(name in _homes(kind) for kind in kinds):
            waiting.add(name)
    if waiting:
        # What holds a module object is not known, so all objects are looked at: 30 ms for a million.
        waiting -= {home for kind in set(map(type, gc.get_objects())) for home in _homes(kind)}
    if waiting:
        note(f"imported too early to be patched, and not used yet: {', '.join(sorted(waiting))}")
        if not STATE.unused:
            _watch()
        STATE.unused = waiting
    report(name for name in names if name not in waiting)


def _homes(kind: type) -> list[str]:
    """Return the modules of the bases of a class of module objects; none for any other class."""
    torch: Any = sys.modules.get("torch.nn")
    if torch is None or torch.Module not in kind.__mro__:
        return []
    return [base.__module__ for base in kind.__mro__]


def _watch() -> None:
    from torch.nn.modules.module import register_module_module_registration_hook

    seen: set[type] = set()

    def look(parent: object, name: str, child: object) -> None:
        kinds = {type(parent), type(child)} - seen
        seen.update(kinds)
        used = STATE.unused.intersection(home for kind in kinds for home in _homes(kind))
        STATE.unused = STATE.unused - used if STATE.handles else set()
        if not STATE.unused:
            hook.remove()
        if STATE.handles:
            report(used)

    hook = register_module_module_registration_hook(look)

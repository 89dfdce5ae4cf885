"""Modules that were imported before the hook was active: named, with the remedy; an error under strict."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import ModuleType

from veomni_hook.errors import AlreadyImportedError, AlreadyImportedWarning


def is_patched(module: ModuleType) -> bool:
    """Whether this module runs patched source."""
    from veomni_hook.finders.loader import PatchedLoader

    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), PatchedLoader)


def report(names: Iterable[str]) -> None:
    """Warn about each named module that is in `sys.modules` and not patched.

    Raises:
        AlreadyImportedError: in strict mode.
    """
    from veomni_hook.finders.handle import current_settings

    loaded = [
        (name, sys.modules[name])
        for name in dict.fromkeys(names)
        if isinstance(sys.modules.get(name), ModuleType) and not is_patched(sys.modules[name])
    ]
    if not loaded:
        return
    listing = ", ".join(f"{name} (from {getattr(module, '__file__', None)})" for name, module in loaded)
    what = f"imported before the hook could patch it: {listing}"
    fix = (
        "put `import veomni_hook.install` (or register the config) above the first import of transformers, "
        "or start the script with `veomni-hook run`"
    )
    if current_settings().strict:
        raise AlreadyImportedError(what, where="sys.modules", fix=fix)
    warnings.warn(f"{what}; these modules stay unpatched. Fix: {fix}", AlreadyImportedWarning, stacklevel=4)

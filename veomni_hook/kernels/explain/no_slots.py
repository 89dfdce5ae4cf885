"""Why a model has no kernel slots: the hook is off, was activated too late, or found nothing to patch."""

from __future__ import annotations

import os
import re
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from veomni_hook.errors import KernelError
from veomni_hook.layout import shortened

if TYPE_CHECKING:
    from torch import nn

__all__ = ["no_slots"]

_MODELING = re.compile(r"transformers\.models\.(\w+\.)+modeling_\w+|transformers_modules\..+")
_FINDERS = "veomni_hook.finders.finder"
_FIRST = (
    "put `import veomni_hook.install` above the first import of transformers, or start the script with "
    "`veomni-hook run`; to patch a model that is already loaded, call `veomni_hook.adopt(model)`"
)


def no_slots(model: nn.Module, where: str) -> KernelError:
    """Return the error for a model whose modules have no kernel slots."""
    modules = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    names = sorted(name for name in modules if _MODELING.fullmatch(name))
    why, fix = _why(names)
    return KernelError(f"a {type(model).__name__} has no kernel slots: {why}", where=where, fix=fix)


def _why(names: list[str]) -> tuple[str, str]:
    if not names:
        fix = "pass the model itself, a transformers model made from modeling files that the hook has patched"
        return "no class in it is from a modeling file of transformers", fix
    # Kernels do not import finders; the interpreter's meta path shows whether the hook is active.
    hook = next((finder for finder in sys.meta_path if type(finder).__module__ == _FINDERS), None)
    if hook is None:
        switch = os.environ.get("VEOMNI_HOOK")
        if switch is not None and switch.lower() in ("0", "false", "no", "off"):
            return f"the hook is off, VEOMNI_HOOK={switch}", "unset VEOMNI_HOOK, or remove the call to bind"
        return f"the hook is not active, so {shortened(names)} was not patched", _FIRST
    if all(name.startswith("transformers_modules.") for name in names):
        fix = "set VEOMNI_REMOTE_CODE=1 before the model is loaded"
        return f"the hook did not patch the remote code {shortened(names)}", fix
    late = [name for name in names if not _was_asked_for(name)]
    if late:
        others = [type(finder).__name__ for finder in sys.meta_path[: sys.meta_path.index(hook)]]
        ahead = f", or taken by a finder ahead of it ({', '.join(others)})" if others else ""
        return f"the hook came too late: {shortened(late)} was imported before it was active{ahead}", _FIRST
    fix = (
        "see `veomni-hook doctor` for the settings in force: VEOMNI_IDIOMS=0 disables idioms, and an op of "
        "which auto takes no kernel is routed only if VEOMNI_KERNELS names one before the import"
    )
    return f"the hook found nothing to route in {shortened(names)}", fix


def _was_asked_for(name: str) -> bool:
    """Return whether the hook was active when a module was imported: it patched or inspected it."""
    state = sys.modules.get("veomni_hook.finders.state")
    if state is not None and name in state.STATE.asked:
        return True
    module = sys.modules.get(name)
    return isinstance(module, ModuleType) and "veomni_hook" in type(module.__loader__).__module__

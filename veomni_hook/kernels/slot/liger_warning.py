"""A warning, once per process, if Liger's functions replace code that this package has patched.

Both replace the same code. Where Liger's runs, the guard is not asked; elsewhere ours runs. A fused kernel of
ours refuses a call if a norm has another forward, and upstream's code runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.kernels.shared.origin import home_of, name_of
from veomni_hook.kernels.slot.guards import guards_in, slots_in

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LIGER", "warn_of_first_call", "warn_of_stacked"]

LIGER = "liger_kernel"
_WARNED: list[str] = []


def warn_of_stacked(target: nn.Module | ModuleType | Any) -> None:
    """Warn, once per process, of Liger's functions in a model or a patched module."""
    if _WARNED or LIGER not in sys.modules:
        return
    modules = list(target.modules()) if callable(getattr(target, "modules", None)) else []
    names = dict.fromkeys(base.__module__ for module in modules for base in type(module).__mro__)
    patched: list[ModuleType | None] = [sys.modules.get(name) for name in names]
    if isinstance(target, ModuleType):
        patched = [target]
    _warn(patched, modules)


def warn_of_first_call(module_name: str, owner: object) -> None:
    """Warn in the same way at the first call of ``owner``, whose class asks a slot of the patched module.

    Checks that module, ``owner`` and its children, to warn also users who never call `explain`.
    """
    if _WARNED or LIGER not in sys.modules:
        return
    modules = [owner, *getattr(owner, "_modules", {}).values()]
    _warn([sys.modules.get(module_name)], modules)


def _warn(patched: list[ModuleType | None], instances: list[object]) -> None:
    names = dict.fromkeys([*_in_modules(patched), *_on_instances(instances)])
    if not names:
        return
    _WARNED.extend(names)
    warnings.warn(
        "two libraries are stacked on one model, Liger and veomni-hook. Liger replaces "
        f"{', '.join(names)}; everywhere else, veomni-hook or upstream's code runs, without kernels that "
        "fuse these places with others. Use one of the two: leave out apply_liger_kernel_to_* and "
        "use_liger_kernel=True (VEOMNI_KERNELS=liger runs Liger's kernels through veomni-hook), or switch "
        "veomni-hook off with VEOMNI_HOOK=0. veomni_hook.explain(model) shows what runs at each place",
        VeomniHookWarning,
        stacklevel=4,
    )


def _is_ligers(value: object) -> bool:
    return isinstance(value, (type, FunctionType, MethodType)) and home_of(value).partition(".")[0] == LIGER


def _in_modules(modules: list[ModuleType | None]) -> Iterator[str]:
    """Yield the guards of patched modules whose function, class or method is now Liger's."""
    for module in modules:
        for guard in guards_in(module) if module is not None and slots_in(module) else ():
            kind = vars(module).get(guard.kind)
            if _is_ligers(vars(module).get(guard.function)):
                yield f"{guard.function} ({name_of(vars(module)[guard.function])})"
            if _is_ligers(kind):
                yield f"{guard.kind} ({name_of(kind)})"
            elif isinstance(kind, type) and _is_ligers(vars(kind).get(guard.method)):
                yield f"{guard.kind}.{guard.method} ({name_of(vars(kind)[guard.method])})"


def _on_instances(modules: list[object]) -> Iterator[str]:
    """Yield the modules of patched classes whose forward is Liger's."""
    for module in modules:
        own = None if module is None else vars(module).get("forward")
        home = sys.modules.get(type(module).__module__)
        if _is_ligers(own) and home is not None and slots_in(home):
            yield f"the forward of a {type(module).__qualname__} ({name_of(own)})"

"""Kernels for one model, independent of the process's choice: `bind`, and the context `use_kernels`.

A module's binding is a dict from ops to backends in its ``__dict__``. It holds plain strings: copies and
pickles keep it, even where veomni_hook is not installed, and state dicts do not contain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.choice import AUTO, Choice, choice_of
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import excluded
from veomni_hook.layout import counted, shortened

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["BINDING", "bind", "binding_of", "use_kernels", "wanted_by"]

#: The attribute of a module that holds its binding.
BINDING = "_veomni_kernels"


def bind(model: nn.Module, preset: str | None = None, /, **ops: str | None) -> None:
    """Bind every module of ``model`` to kernels, from its next call on.

    A binding overrides `use_kernels` and the settings of the process. Ops that are not named keep their
    previous binding. Modules that are added to the model later are not bound.

    Args:
        model: any ``nn.Module``; applies to those of its modules that have kernel slots.
        preset: ``auto``, ``eager`` or a backend, for every op.
        **ops: the same for single ops; None removes the op's binding.

    Raises:
        KernelError: an op or a backend does not exist, the model has no kernel slots (the message says why),
            or a backend has no kernel for the variant of a site in the model (the message lists all such
            sites). In these cases nothing is bound.
    """
    if not callable(getattr(model, "modules", None)):
        raise KernelError(
            f"a {type(model).__name__} has no kernel slots", where="bind", fix="pass a model (an nn.Module)"
        )
    named = {op: backend for op, backend in ops.items() if backend is not None}
    choice = choice_of(preset, named, _said("bind", preset, ops))
    changes: dict[str, str | None] = {op: choice.named(op) for op in registry.ops() if choice.named(op)}
    for op in ops.keys() - named.keys():
        registry.check(op)
        changes[op] = None
    _check_sites(model, choice)
    from veomni_hook.kernels.slot.liger_warning import warn_of_stacked

    warn_of_stacked(model)
    for module in model.modules():
        bound = {**(binding_of(module) or {}), **changes}
        kept = {op: backend for op, backend in bound.items() if backend is not None}
        if kept:
            vars(module)[BINDING] = kept
        else:
            vars(module).pop(BINDING, None)


def binding_of(module: Any) -> Mapping[str, str] | None:
    """Return what ``module`` is bound to, by op, or None."""
    found: Mapping[str, str] | None = vars(module).get(BINDING)
    return found


def wanted_by(owner: Any, op: str) -> str:
    """Return ``auto``, ``eager`` or the backend that is chosen for ``op`` in the module ``owner``."""
    bound = binding_of(owner)
    return (bound or {}).get(op) or STATE.wanted.get(op, AUTO)


@contextmanager
def use_kernels(preset: str | None = None, /, **ops: str) -> Iterator[None]:
    """Choose kernels inside a ``with`` block: for calls of unbound modules, and for new models.

    Modules constructed in the block, in any way (``from_pretrained`` too), are bound to this choice
    permanently, as `bind` does. For calls, the choice applies to all threads, like torch's backend flags,
    because a backward that recomputes a checkpoint runs in another thread. A backward that runs after the
    block recomputes the checkpoint with the choice of the process.

    Args:
        preset: ``auto``, ``eager`` or a backend, for every op; overrides the settings of the process.
        **ops: the same for single ops.

    Raises:
        KernelError: an op or a backend does not exist.
    """
    choice = choice_of(preset, ops, _said("use_kernels", preset, ops))
    STATE.contexts = (*STATE.contexts, choice)
    STATE.changed()
    hooks = _binding_what_is_made()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        # By identity: contexts in threads may close in any order, and two may hold equal choices.
        STATE.contexts = tuple(other for other in STATE.contexts if other is not choice)
        STATE.changed()


def _said(function: str, preset: str | None, ops: Mapping[str, str | None]) -> str:
    words = [repr(preset)] if preset is not None else []
    return f"{function}({', '.join([*words, *(f'{op}={backend!r}' for op, backend in ops.items())])})"


def _binding_what_is_made() -> list[RemovableHandle]:
    """Bind modules at their first parameter or child: no other hook reports that a module is constructed."""
    from torch.nn.modules import module as modules

    def note(module: nn.Module, name: str, added: object) -> None:
        held = (*module._modules.values(), *module._parameters.values())
        if any(one is not None for one in held):
            return  # it was constructed earlier
        said = Choice()
        for choice in STATE.contexts:
            said = choice.over(said)
        found = {op: backend for op in registry.ops() if (backend := said.named(op)) is not None}
        if found:
            vars(module)[BINDING] = found

    return [
        modules.register_module_parameter_registration_hook(note),
        modules.register_module_module_registration_hook(note),
    ]


def _check_sites(model: nn.Module, choice: Choice) -> None:
    """Raise KernelError if ``choice`` names a backend that has no kernel for a slot in ``model``."""
    from veomni_hook.kernels.explain import places_of
    from veomni_hook.kernels.explain.no_slots import no_slots

    modules = list(model.named_modules())
    known = {kind: places_of(kind) for kind in dict.fromkeys(type(module) for _, module in modules)}
    if not any(known.values()) and not any(_holds_slots(module) for _, module in modules):
        raise no_slots(model, where=f"bind({type(model).__name__})")
    failing: dict[str, list[str]] = {}
    for place, module in modules:
        kind = type(module)
        for _, slot, _ in known[kind]:
            wanted = choice.named(slot.op)
            if wanted is None or excluded(slot.op, slot.variant, choice) is not None or wanted == AUTO:
                continue
            if not any(kernel.backend == wanted for kernel in registry.kernels(slot.op, slot.variant)):
                site = f"{place or 'the model'} ({kind.__name__})"
                failing.setdefault(f"{slot.op}/{slot.variant} has no {wanted!r} kernel", []).append(site)
    if failing:
        places = "; ".join(f"{why}: {shortened(sites)}" for why, sites in failing.items())
        ops = sorted({why.partition("/")[0] for why in failing})
        raise KernelError(
            f"{counted(len(failing), 'kind')} of place cannot be bound: {places}",
            where=f"bind({type(model).__name__})",
            fix=f"bind these ops to something else, e.g. {', '.join(f'{op}=auto' for op in ops)}",
        )


def _holds_slots(module: nn.Module) -> bool:
    """Return whether a module itself holds slots, as modules written for these kernels may."""
    from veomni_hook.kernels.slot import Slot

    return any(isinstance(value, Slot) for value in vars(module).values())

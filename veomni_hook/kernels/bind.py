"""Binding a model to kernels of its own: `veomni_hook.bind`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veomni_hook.errors import KernelError, SettingsError
from veomni_hook.kernels.explain.no_slots import no_slots
from veomni_hook.kernels.explain.places import places_of
from veomni_hook.kernels.selection.binding import rebind
from veomni_hook.kernels.selection.choice import AUTO, Choice, call_text, choice_of
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import excluded
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.slot.liger_warning import warn_of_stacked
from veomni_hook.layout import counted, shortened
from veomni_hook.settings import precision_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["bind"]


def bind(
    model: nn.Module, preset: str | None = None, /, *, precision: str | None = None, **ops: str | None
) -> None:
    """Bind every module of ``model`` to kernels, from its next call on.

    A binding overrides `use_kernels` and the settings of the process. Ops that are not named keep their
    previous binding. Modules that are added to the model later are not bound.

    Args:
        model: any ``nn.Module``; applies to those of its modules that have kernel slots.
        preset: ``auto``, ``eager`` or a backend, for every op.
        precision: a value of the setting of this name, for linear layers and experts of this model:
            ``float8``, ``mxfp8``, or ``none``. Call it before the model is wrapped or sharded.
        **ops: the same for single ops; None removes the op's binding.

    Raises:
        KernelError: an op or a backend does not exist, the model has no kernel slots (the message says why),
            or a backend has no kernel for the variant of a site in the model (the message lists all such
            sites). In these cases nothing is bound.
        SettingsError: ``precision`` is no value of the setting.
    """
    if not callable(getattr(model, "modules", None)):
        raise KernelError(
            f"a {type(model).__name__} has no kernel slots", where="bind", fix="pass a model (an nn.Module)"
        )
    if precision is not None:
        _multiply(model, precision)
        if preset is None and not ops:
            return
    named = {op: backend for op, backend in ops.items() if backend is not None}
    choice = choice_of(preset, named, call_text("bind", preset, ops))
    changes: dict[str, str | None] = {op: choice.named(op) for op in registry.names() if choice.named(op)}
    for op in ops.keys() - named.keys():
        registry.check(op)
        changes[op] = None
    _check_sites(model, choice)
    STATE.tell_named(changes)
    warn_of_stacked(model)
    for module in model.modules():
        rebind(module, changes)


def _multiply(model: nn.Module, precision: str) -> None:
    """Let linear layers and experts of ``model`` multiply as a value of the setting says."""
    from veomni_hook.kernels.float8.layers import adapt, restore  # imports torch
    from veomni_hook.kernels.float8.setting import parsed

    try:
        asked = parsed(precision_of(precision))
    except ValueError as error:
        raise SettingsError(
            f"precision has the illegal value {precision!r}", where="bind", fix=f"legal values: {error}"
        ) from None
    restore(model)
    adapt(model, asked)


def _check_sites(model: nn.Module, choice: Choice) -> None:
    """Raise KernelError if ``choice`` names a backend that has no kernel for a slot in ``model``."""
    modules = list(model.named_modules())
    places = {kind: places_of(kind) for kind in dict.fromkeys(type(module) for _, module in modules)}
    # Modules written for these kernels may hold slots themselves.
    attributes = (value for _, module in modules for value in vars(module).values())
    if not any(places.values()) and not any(isinstance(value, Slot) for value in attributes):
        raise no_slots(model, where=f"bind({type(model).__name__})")
    failing: dict[str, list[str]] = {}
    for place, module in modules:
        kind = type(module)
        for _, slot, _ in places[kind]:
            wanted = choice.named(slot.op)
            if wanted is None or excluded(slot.op, slot.variant, choice) is not None or wanted == AUTO:
                continue
            if not any(kernel.backend == wanted for kernel in registry.kernels(slot.op, slot.variant)):
                site = f"{place or 'the model'} ({kind.__name__})"
                failing.setdefault(f"{slot.op}/{slot.variant} has no {wanted!r} kernel", []).append(site)
    if failing:
        reasons = "; ".join(f"{why}: {shortened(sites)}" for why, sites in failing.items())
        ops = sorted({why.partition("/")[0] for why in failing})
        raise KernelError(
            f"{counted(len(failing), 'kind')} of place cannot be bound: {reasons}",
            where=f"bind({type(model).__name__})",
            fix=f"bind these ops to something else, e.g. {', '.join(f'{op}=auto' for op in ops)}",
        )

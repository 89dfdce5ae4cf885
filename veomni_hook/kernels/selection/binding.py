"""What is chosen for single modules: their binding, and the context `use_kernels`, which binds new ones.

A module's binding, which `veomni_hook.bind` sets, is a dict from ops to backends in its ``__dict__``. It
holds plain strings: copies and pickles keep it, even where veomni_hook is not installed, and state dicts do
not contain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from veomni_hook.kernels.selection.choice import AUTO, Choice, call_text, choice_of
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import registry

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["BINDING", "binding_of", "rebind", "use_kernels", "wanted_by"]

#: The attribute of a module that holds its binding.
BINDING = "_veomni_kernels"


def binding_of(module: object) -> Mapping[str, str] | None:
    """Return what ``module`` is bound to, by op, or None."""
    bound: Mapping[str, str] | None = vars(module).get(BINDING)
    return bound


def rebind(module: object, changes: Mapping[str, str | None]) -> None:
    """Change what ``module`` is bound to, by op; None removes an op's binding."""
    bound = {**(binding_of(module) or {}), **changes}
    kept = {op: backend for op, backend in bound.items() if backend is not None}
    if kept:
        vars(module)[BINDING] = kept
    else:
        vars(module).pop(BINDING, None)


def wanted_by(owner: object, op: str) -> str:
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
    choice = choice_of(preset, ops, call_text("use_kernels", preset, ops))
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


def _binding_what_is_made() -> list[RemovableHandle]:
    """Bind modules at their first parameter or child: no other hook reports that a module is constructed."""
    from torch.nn.modules import module as modules

    def note(module: nn.Module, name: str, added: object) -> None:
        members = (*module._modules.values(), *module._parameters.values())
        if any(member is not None for member in members):
            return  # it was constructed earlier
        chosen = Choice()
        for choice in STATE.contexts:
            chosen = choice.over(chosen)
        bound = {op: backend for op in registry.names() if (backend := chosen.named(op)) is not None}
        if bound:
            vars(module)[BINDING] = bound

    return [
        modules.register_module_parameter_registration_hook(note),
        modules.register_module_module_registration_hook(note),
    ]

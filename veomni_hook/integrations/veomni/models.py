"""`register_models`: VeOmni's loader builds classes of transformers' own modules, which the hook patches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from veomni_hook.errors import ConfigError
from veomni_hook.finders.state import STATE
from veomni_hook.integrations.veomni.upstream import attribute

__all__ = ["register_models"]

_WHERE = "veomni_hook.integrations.veomni.register_models"


def register_models(*model_types: str) -> None:
    """Let VeOmni's loader build the hook's models of these types, instead of those that VeOmni generated.

    VeOmni's entry of a type still decides which class an architecture means. What it attaches to that class
    (converters of checkpoints and of LoRA's targets) is attached to transformers' class of the same name.

    Args:
        model_types: keys of VeOmni's ``MODELING_REGISTRY``, the ``model_type`` of configs. A type that is
            registered again stays as it is.

    Raises:
        ConfigError: the hook is not active, VeOmni has no such type, or, when a model is built, transformers
            has no such class.
        KernelError: VeOmni is not installed, or has no such registry.
    """
    if not STATE.handles:
        fix = "put `import veomni_hook.install` above it"
        raise ConfigError("the hook is not active, so models would be unpatched", where=_WHERE, fix=fix)
    registry = attribute("veomni.models.loader", "MODELING_REGISTRY")
    types = sorted(registry)  # asking it for one that it does not have raises
    if unknown := [name for name in model_types if name not in types]:
        raise ConfigError(
            f"VeOmni has no models of type {', '.join(unknown)}",
            where=_WHERE,
            fix=f"its types: {', '.join(types)}",
        )
    for name in model_types:
        own = registry[name]
        if getattr(own, "func", None) is not _hooked:
            registry[name] = partial(_hooked, own)


def _hooked(own: Callable[[str], Any], architecture: str) -> Any:
    """Transformers' class of the name that VeOmni's entry gives, with what the entry attaches to its own."""
    import transformers

    generated = own(architecture)
    hooked = getattr(transformers, generated.__name__, None)
    if hooked is None:
        raise ConfigError(
            f"transformers has no class {generated.__name__}, which VeOmni means by {architecture}",
            where=_WHERE,
            fix="leave out its type",
        )
    for name, value in vars(generated).items():
        # A function of a module, or what is made of one: no part of the class's own code.
        function = value.__func__ if isinstance(value, staticmethod) else None
        attached = function is not None and "." not in getattr(function, "__qualname__", "")
        if attached and name not in vars(hooked):
            setattr(hooked, name, value)
    return hooked

"""Classes that patched modules construct in place of their own: what `map_class` puts into a module.

A patched module holds one `MappedClass` for each of its classes that a config maps, and asks it at every
constructor call. The replacement is imported at that moment, so it may subclass the class that it replaces.
Imports neither torch nor transformers by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import Any

from veomni_hook.errors import ReplacementError, SignatureError
from veomni_hook.patches.unmapped import UNMAPPED

__all__ = ["MAPPED", "MappedClass", "loaded_instances", "set_active", "use_mapped_classes"]

#: Every mapped class of the loaded patched modules, by module and name.
MAPPED: dict[tuple[str, str], MappedClass] = {}
_WANTED: ContextVar[bool] = ContextVar("veomni_mapped_classes", default=True)
_ACTIVE = [True]


@contextmanager
def use_mapped_classes(*, on: bool) -> Iterator[None]:
    """Construct replacements (``on=True``) or the modules' own classes in this block, thread or task.

    The innermost block decides. Existing models do not change. A new thread starts with replacements.
    """
    token = _WANTED.set(on)
    try:
        yield
    finally:
        _WANTED.reset(token)


def set_active(*, active: bool) -> None:
    """Let every mapped class answer with the module's own class while the hook is not active."""
    _ACTIVE[0] = active


class MappedClass:
    """A class of a patched module, and the class to construct in its place.

    Args:
        name: the class's name in the module.
        replacement: ``package.module:Name`` of the class to construct.
        home: the patched module's name.
        config: the name of the config that declares it.
        declared: the target as the config declares it, a name or an expression.
        weights: ``package.module:name`` of conversions for checkpoints; empty if there are none.

    Attributes:
        gave_way: the class that transformers' own class mapping put there instead, once that happened.
    """

    def __init__(
        self, name: str, replacement: str, home: str, *, config: str, declared: str, weights: str = ""
    ) -> None:
        self.name, self.replacement, self.home = name, replacement, home
        self.config, self.declared, self.weights = config, declared, weights
        self.gave_way: Callable[..., Any] | None = None
        MAPPED[home, name] = self

    def __call__(self, current: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call with the constructor's arguments.

        Args:
            current: what the class's name is bound to now. If that is another class, the user or
                transformers' own class mapping has replaced it, and this returns it, because its weights come
                with conversions of their own.
        """
        if not self.in_force:
            return current
        bound = getattr(current, "__module__", ""), getattr(current, "__qualname__", "")
        if bound != (self.home, self.name):
            self.gave_way = current
            return current
        return self._construct

    @property
    def in_force(self) -> bool:
        """Whether constructor calls get the replacement here and now."""
        return _ACTIVE[0] and _WANTED.get() and (self.config, self.declared) not in UNMAPPED

    @cached_property
    def kind(self) -> type:
        """The class to construct.

        Raises:
            ReplacementError: it cannot be imported, or is not a subclass of ``torch.nn.Module``.
        """
        from torch import nn

        found = self.named(self.replacement)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ReplacementError(
                f"{self.replacement}, to which {self.name} is mapped, is no subclass of torch.nn.Module",
                where=self.where,
                fix="map the class to a class of modules",
                target=self.name,
            )
        if self.weights:
            from veomni_hook.patches.mapped_weights import serve_conversions

            serve_conversions(loaded_instances)
        return found

    @property
    def where(self) -> str:
        """The place that errors name."""
        return f"{self.home}; declared in {self.config}: map_class({self.declared!r})"

    def named(self, text: str) -> Any:
        """Import what ``package.module:name`` names; raises ReplacementError if that fails."""
        module, _, name = text.partition(":")
        try:
            found = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise ReplacementError(
                f"{text}, which belongs to the mapping of {self.name}, cannot be imported: "
                f"{type(error).__name__}: {error}",
                where=self.where,
                fix="correct the name or the module; `map_class` imports it when a model is built",
                target=self.name,
            ) from error
        return found

    def is_instance(self, module: object) -> bool:
        """Whether ``module`` has the replacement's class; imports nothing."""
        return "kind" in vars(self) and type(module) is self.kind

    def either(self, own: type) -> type:
        """Return a stand-in for ``own`` of which instances of the replacement are instances, too.

        For `_can_record_outputs`: transformers records the outputs of modules that are instances of a class.
        """
        return _Either(own.__name__, (), {"__module__": own.__module__, "own": own, "mapped": self})

    def _construct(self, *args: Any, **kwargs: Any) -> Any:
        try:
            signature(self.kind).bind(*args, **kwargs)
        except TypeError as error:
            raise SignatureError(
                f"{self.replacement} cannot be constructed as {self.name} is: {error}",
                where=self.where,
                fix=f"give its __init__ the parameters of {self.home}.{self.name}",
                target=self.name,
            ) from error
        return self.kind(*args, **kwargs)


class _Either(type):
    """The class of the stand-ins that `MappedClass.either` makes."""

    def __instancecheck__(cls, instance: object) -> bool:
        attributes: Any = vars(cls)
        return isinstance(instance, attributes["own"]) or attributes["mapped"].is_instance(instance)


def loaded_instances(model: Any) -> Iterator[MappedClass]:
    """Yield the mapped classes whose replacements ``model`` has, each once."""
    kinds = {type(module) for module in model.modules()}
    for mapped in list(MAPPED.values()):
        if "kind" in vars(mapped) and mapped.kind in kinds:
            yield mapped

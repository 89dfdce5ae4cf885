"""Classes that patched modules construct in place of their own: what `map_class` puts into a module.

A patched module holds one `MappedClass` for each of its classes that a config maps, and asks it at every
constructor call. The replacement is imported at that moment, so it may subclass the class that it
replaces. Imports neither torch nor transformers by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from importlib import import_module
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import ReplacementError, SignatureError
from veomni_hook.patches.mappings import MAPPED, follow_at_load

if TYPE_CHECKING:
    from veomni_hook.patches.records import Patch

__all__ = ["MAPPED", "MappedClass", "Replacement", "loaded_instances", "set_active", "use_mapped_classes"]


class Replacement:
    """A class to construct in place of another one.

    Args:
        name: ``package.module:Name`` of the class.
        replaced: the name of the class in whose place it is constructed.
        home: the module of that class.
        config: the name of the config that declares it.
        declared: the target as the config declares it, a name or an expression.
        weights: ``package.module:name`` of conversions for checkpoints; empty if there are none.
        renamed: the new names of parameters of that class's forward, by those of earlier releases.
    """

    def __init__(
        self,
        name: str,
        replaced: str,
        home: str,
        *,
        config: str,
        declared: str,
        weights: str,
        renamed: Mapping[str, str],
    ) -> None:
        self.name, self.replaced, self.home = name, replaced, home
        self.config, self.declared, self.weights = config, declared, weights
        self._renamed = renamed

    @cached_property
    def kind(self) -> type:
        """The class.

        Raises:
            ReplacementError: it cannot be imported, or is not a subclass of ``torch.nn.Module``.
            SignatureError: its forward has a parameter's earlier name, which no caller passes any more.
        """
        from torch import nn

        found = self.named(self.name)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ReplacementError(
                f"{self.name}, to which {self.replaced} is mapped, is no subclass of torch.nn.Module",
                where=self.where,
                fix="map the class to a class of modules",
                target=self.replaced,
            )
        parameters = signature(found.forward).parameters
        for old, new in self._renamed.items():
            if old in parameters and new not in parameters:
                raise SignatureError(
                    f"{self.name}.forward takes {old}, which is {new} in this release: callers pass {new}",
                    where=self.where,
                    fix=f"rename the parameter {old} of {self.name}.forward to {new}, or take both",
                    target=self.replaced,
                )
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
                f"{text}, which belongs to the mapping of {self.replaced}, cannot be imported: "
                f"{type(error).__name__}: {error}",
                where=self.where,
                fix="correct the name or the module; `map_class` imports it when a model is built",
                target=self.replaced,
            ) from error
        return found

    def is_kind(self, kind: type) -> bool:
        """Whether ``kind`` is the class, if a model has been built with it; imports nothing."""
        return vars(self).get("kind") is kind

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the class.

        Raises:
            ReplacementError: see `kind`.
            SignatureError: the class does not take these arguments; see `kind`.
        """
        try:
            signature(self.kind).bind(*args, **kwargs)
        except TypeError as error:
            raise SignatureError(
                f"{self.name} cannot be constructed as {self.replaced} is: {error}",
                where=self.where,
                fix=f"give its __init__ the parameters of {self.home}.{self.replaced}",
                target=self.replaced,
            ) from error
        return self.kind(*args, **kwargs)


_WANTED: ContextVar[bool] = ContextVar("veomni_mapped_classes", default=True)
_ACTIVE = [True]


@contextmanager
def use_mapped_classes(*, on: bool = True) -> Iterator[None]:
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
        renamed: the new names of parameters of the class's forward, by those of earlier releases.

    Attributes:
        current: what is constructed now; None if the config has taken the mapping back.
        targets: the targets of all declarations that were in force.
        replacements: by ``package.module:Name``, all that were in force: existing models have their classes.
        gave_way: the class that transformers' own class mapping put there instead, once that happened.
    """

    def __init__(
        self,
        name: str,
        replacement: str,
        home: str,
        *,
        config: str,
        declared: str,
        weights: str = "",
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name, self.home, self.config, self.renamed = name, home, config, renamed
        self.current: Replacement | None = self._replacement(replacement, declared, weights)
        self.replacements = {replacement: self.current}
        self.declared, self.targets = declared, {declared}
        self._listed = {replacement}  # the module's text has it
        self.gave_way: Callable[..., Any] | None = None
        MAPPED[home, name] = self
        follow_at_load(self)

    def __call__(self, current: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call with the constructor's arguments.

        Args:
            current: what the class's name is bound to now. If that is another class, the user or
                transformers' own class mapping has replaced it, and this returns it, because its weights come
                with conversions of their own.
        """
        replacement = self.current
        if replacement is None or not (_ACTIVE[0] and _WANTED.get()):
            return current
        bound = getattr(current, "__module__", ""), getattr(current, "__qualname__", "")
        if bound != (self.home, self.name):
            self.gave_way = current
            return current
        if replacement.weights:
            from veomni_hook.patches.mapped_weights import serve_conversions

            serve_conversions(loaded_instances)
        self._list(replacement)
        return replacement.construct

    def map_to(self, patch: Patch | None) -> None:
        """Construct from now on what ``patch`` maps the class to; None: the module's own class."""
        if patch is None:
            self.current = None
            return
        module, _, name = (patch.replacement_source or "").rpartition(".")
        text = f"{module}:{name}"
        made = self._replacement(text, patch.target, patch.weights)
        known = self.replacements.get(text)
        if known is not None and "kind" in vars(known):
            made.kind = known.kind
        self.replacements[text] = self.current = made
        self.declared = patch.target
        self.targets.add(patch.target)

    def is_instance(self, module: object) -> bool:
        """Whether ``module`` has the class of a replacement; imports nothing."""
        return any(each.is_kind(type(module)) for each in list(self.replacements.values()))

    def either(self, own: type) -> type:
        """Return a stand-in for ``own`` of which instances of the replacement are instances, too.

        For `_can_record_outputs`: transformers records the outputs of modules that are instances of a class.
        """
        return _Either(own.__name__, (), {"__module__": own.__module__, "own": own, "mapped": self})

    def _replacement(self, text: str, declared: str, weights: str) -> Replacement:
        return Replacement(
            text,
            self.name,
            self.home,
            config=self.config,
            declared=declared,
            weights=weights,
            renamed=self.renamed,
        )

    def _list(self, replacement: Replacement) -> None:
        """Add the class to the module's lists of classes that are not split, where they have this one."""
        home = sys.modules.get(self.home)
        if replacement.name in self._listed or home is None:
            return
        self._listed.add(replacement.name)
        new = replacement.name.rpartition(":")[2]
        for kind in list(vars(home).values()):
            listed = vars(kind).get("_no_split_modules") if isinstance(kind, type) else None
            if isinstance(listed, list) and self.name in listed and new not in listed:
                setattr(kind, "_no_split_modules", [*listed, new])  # noqa: B010 - unknown to the type checker


class _Either(type):
    """The class of the stand-ins that `MappedClass.either` makes."""

    def __instancecheck__(cls, instance: object) -> bool:
        attributes: Any = vars(cls)
        return isinstance(instance, attributes["own"]) or attributes["mapped"].is_instance(instance)


def loaded_instances(model: Any) -> Iterator[Replacement]:
    """Yield the replacements whose classes ``model`` has, each once."""
    kinds = {type(module) for module in model.modules()}
    for mapped in list(MAPPED.values()):
        for replacement in list(mapped.replacements.values()):
            if any(map(replacement.is_kind, kinds)):
                yield replacement

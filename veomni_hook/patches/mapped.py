"""Classes that patched modules construct in place of their own: what `map_class` puts into a module.

A patched module holds one `MappedClass` for each of its classes that a config maps, and asks it at every
constructor call. The replacement is imported at that moment, so it may subclass the class that it
replaces. Imports neither torch nor transformers by itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, wraps
from importlib import import_module
from inspect import signature
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import CheckpointError, ReplacementError, SignatureError
from veomni_hook.patches.mappings import CHANGED, MAPPED, holding

if TYPE_CHECKING:
    from torch import nn

    from veomni_hook.patches.records import Patch

__all__ = ["MAPPED", "MappedClass", "Replacement", "loaded_instances", "set_active", "use_mapped_classes"]


@dataclass(eq=False, repr=False)
class Replacement:
    """A class to construct in place of another one.

    Args:
        mapped: the class in whose place it is constructed.
        name: ``package.module:Name`` of the class.
        declared: the target as the config declares it, a name or an expression.
        weights: ``package.module:name`` of conversions for checkpoints; empty if there are none.
    """

    mapped: MappedClass
    name: str
    declared: str
    weights: str

    @property
    def _place(self) -> dict[str, str]:
        """What errors say of where they are."""
        home, config = self.mapped.home, self.mapped.config
        where = f"{home}; declared in {config}: map_class({self.declared!r})"
        return {"where": where, "target": self.mapped.name}

    @cached_property
    def kind(self) -> type:
        """The class.

        Raises:
            ReplacementError: it cannot be imported, or is not a subclass of ``torch.nn.Module``.
            SignatureError: its forward has a parameter's earlier name, which no caller passes any more.
        """
        from torch import nn

        subclass = self.named(self.name)
        if not (isinstance(subclass, type) and issubclass(subclass, nn.Module)):
            raise ReplacementError(
                f"{self.name}, to which {self.mapped.name} is mapped, is no subclass of torch.nn.Module",
                fix="map the class to a class of modules",
                **self._place,
            )
        parameters = signature(subclass.forward).parameters
        for old, new in self.mapped.renamed.items():
            if old in parameters and new not in parameters:
                raise SignatureError(
                    f"{self.name}.forward takes {old}, which is {new} in this release: callers pass {new}",
                    fix=f"rename the parameter {old} of {self.name}.forward to {new}, or take both",
                    **self._place,
                )
        return subclass

    def named(self, text: str) -> Any:
        """Import what ``package.module:name`` names; raises ReplacementError if that fails."""
        module, _, name = text.partition(":")
        try:
            value = import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
        except Exception as error:
            raise ReplacementError(
                f"{text}, which belongs to the mapping of {self.mapped.name}, cannot be imported: "
                f"{type(error).__name__}: {error}",
                fix="correct the name or the module; `map_class` imports it when a model is built",
                **self._place,
            ) from error
        return value

    def is_kind(self, kind: type) -> bool:
        """Whether ``kind`` is the class, if a model has been built with it; imports nothing."""
        return vars(self).get("kind") is kind

    def construct(self, *args: object, **kwargs: object) -> object:
        """Return an instance of the class.

        Raises:
            ReplacementError: see `kind`.
            SignatureError: the class does not take these arguments; see `kind`.
        """
        try:
            signature(self.kind).bind(*args, **kwargs)
        except TypeError as error:
            raise SignatureError(
                f"{self.name} cannot be constructed as {self.mapped.name} is: {error}",
                fix=f"give its __init__ the parameters of {self.mapped.home}.{self.mapped.name}",
                **self._place,
            ) from error
        return self.kind(*args, **kwargs)

    def conversions(self, *, quantised: bool) -> list[object]:
        """Return transformers' conversions from upstream's checkpoints, made or copied for one use.

        Raises:
            CheckpointError: the model is quantised.
            ReplacementError: they cannot be imported.
        """
        if quantised:
            raise CheckpointError(
                f"{self.name} has conversions of weights, and the model is quantised",
                where=self._place["where"],
                fix="load without quantisation, or inside use_mapped_classes(on=False)",
            )
        conversions = self.named(self.weights)
        # Copied: transformers collects tensors in these objects.
        return list(conversions()) if callable(conversions) else deepcopy(list(conversions))


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
        self.current: Replacement | None = Replacement(self, replacement, declared, weights)
        self.replacements = {replacement: self.current}
        self.declared, self.targets = declared, {declared}
        self._listed = {replacement}  # the module's text has it
        self.gave_way: Callable[..., object] | None = None
        MAPPED[home, name] = self
        changed = CHANGED.get(config)
        if changed is not None and changed.applies_to(home):  # its text may be older than the config
            self.map_to(holding(changed, name))

    def __call__(self, current: Callable[..., object]) -> Callable[..., object]:
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
            serve_conversions()
        self._list(replacement)
        return replacement.construct

    def map_to(self, patch: Patch | None) -> None:
        """Construct from now on what ``patch`` maps the class to; None: the module's own class."""
        if patch is None:
            self.current = None
            return
        module, _, name = (patch.replacement_source or "").rpartition(".")
        text = f"{module}:{name}"
        replacement = Replacement(self, text, patch.target, patch.weights)
        known = self.replacements.get(text)
        if known is not None and "kind" in vars(known):
            replacement.kind = known.kind
        self.replacements[text] = self.current = replacement
        self.declared = patch.target
        self.targets.add(patch.target)

    def either(self, own: type) -> type:
        """Return a stand-in for ``own`` of which instances of the replacement are instances, too.

        For `_can_record_outputs`: transformers records the outputs of modules that are instances of a class.
        """
        return _Either(own.__name__, (), {"__module__": own.__module__, "own": own, "mapped": self})

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
        replacements: list[Replacement] = list(attributes["mapped"].replacements.values())
        return isinstance(instance, attributes["own"]) or any(
            replacement.is_kind(type(instance)) for replacement in replacements
        )


def loaded_instances(model: nn.Module) -> Iterator[Replacement]:
    """Yield the replacements whose classes ``model`` has, each once."""
    kinds = {type(module) for module in model.modules()}
    for mapped in list(MAPPED.values()):
        for replacement in list(mapped.replacements.values()):
            if any(map(replacement.is_kind, kinds)):
                yield replacement


_CONVERSIONS = "get_model_conversion_mapping"
_LOCK = threading.Lock()


def serve_conversions() -> None:
    """Let transformers use the conversions of mapped classes, besides its own.

    transformers asks `get_model_conversion_mapping` when it loads a model, and when it saves one that it did
    not load. What it loaded with, it reverses when it saves, so saved checkpoints have upstream's layout.
    Changes ``transformers.conversion_mapping`` and the loaded modules that import its function.
    """
    from transformers import conversion_mapping

    with _LOCK:
        upstream: Any = getattr(conversion_mapping, _CONVERSIONS)
        if hasattr(upstream, "veomni_upstream"):
            return

        @wraps(upstream)
        def get_model_conversion_mapping(model: nn.Module, *args: object, **kwargs: object) -> list[object]:
            conversions = upstream(model, *args, **kwargs)
            quantised = getattr(model, "hf_quantizer", None) is not None
            ours = [one.conversions(quantised=quantised) for one in loaded_instances(model) if one.weights]
            # First, because transformers uses the first converter that fits a name.
            return [*chain.from_iterable(ours), *conversions]

        vars(get_model_conversion_mapping)["veomni_upstream"] = upstream
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and vars(module).get(_CONVERSIONS) is upstream:
                setattr(module, _CONVERSIONS, get_model_conversion_mapping)

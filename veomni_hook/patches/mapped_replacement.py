"""The class that is constructed in place of a mapped one: imported when a model is built, and checked.

Imports neither torch nor transformers by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import Any

from veomni_hook.errors import ReplacementError, SignatureError

__all__ = ["Replacement"]


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

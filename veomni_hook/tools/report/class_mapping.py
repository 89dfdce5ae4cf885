"""What `explain` and `list` say about classes that replace others: those of `map_class`, and of transformers.

The registry of transformers (from 5.9 on) is read as it is now, and never imported for this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from veomni_hook.layout import counted

if TYPE_CHECKING:
    from torch import nn

__all__ = ["notes_on_mapped", "registered_classes", "registered_for"]

_OURS, _THEIRS = "veomni_hook.patches.mapped", "transformers.monkey_patching"


def notes_on_mapped(model: nn.Module) -> Iterator[str]:
    """Yield a note for each mapping whose class ``model`` has, and for each that gave way there."""
    kinds = [type(module) for module in model.modules()]
    for pattern, kind in registered_classes().items():
        if number := kinds.count(kind):
            yield (
                f"transformers' class mapping {pattern!r}: {counted(number, 'module')} of the class "
                f"{_name(kind)}, whose code runs as it is"
            )
    ours: Any = sys.modules.get(_OURS)  # loaded by the first patched module with a mapping
    for mapped in () if ours is None else list(ours.MAPPED.values()):
        for replacement in list(mapped.replacements.values()):
            if number := sum(map(replacement.is_kind, kinds)):
                yield (
                    f"class mapping {replacement.declared!r} of {mapped.config}: "
                    f"{counted(number, 'module')} of the class {_name(replacement.kind)} for {mapped.name}"
                )
        if mapped.gave_way in kinds:
            yield (
                f"class mapping {mapped.declared!r} of {mapped.config} gave way: {mapped.name} was already "
                f"replaced by {_name(mapped.gave_way)}"
            )


def registered_classes() -> Mapping[str, type]:
    """The replacements in transformers' registry, by name or expression; empty if there is no registry."""
    registry: Any = sys.modules.get(_THEIRS)
    return {} if registry is None else registry.get_patch_mapping()


def registered_for(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield class, registered name or expression, and replacement for those of ``names`` that it replaces."""
    registry: Any = sys.modules.get(_THEIRS)
    registered = registered_classes()
    for name in names if registered else ():
        kind = registry._find_replacement_class(name, registered)  # its own rules of precedence
        if kind is not None:
            pattern = (
                name
                if name in registered
                else next(key for key, value in registered.items() if value is kind)
            )
            yield name, pattern, _name(kind)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

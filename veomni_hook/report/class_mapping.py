"""Notes of `explain` on classes that transformers' own registry has put into a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from veomni_hook.layout import counted

if TYPE_CHECKING:
    from torch import nn

__all__ = ["notes_on_mapped"]


def notes_on_mapped(model: nn.Module) -> Iterator[str]:
    """Yield a note for each registered class that modules of ``model`` have.

    The registry is read as it is now; a class that was taken out of it since is not known.
    """
    registry: Any = sys.modules.get("transformers.monkey_patching")  # from 5.9 on; not imported for this
    mapping = {} if registry is None else registry.get_patch_mapping()
    if not mapping:
        return
    kinds = [type(module) for module in model.modules()]
    for pattern, kind in mapping.items():
        if number := kinds.count(kind):
            yield (
                f"transformers' class mapping {pattern!r}: {counted(number, 'module')} of the class "
                f"{kind.__module__}.{kind.__qualname__}, whose code runs as it is"
            )

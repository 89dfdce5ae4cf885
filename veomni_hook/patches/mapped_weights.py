"""Conversions of checkpoints that belong to mapped classes, given to transformers with its own.

transformers asks `get_model_conversion_mapping` when it loads a model, and when it saves one that it did not
load. What it loaded with, it reverses when it saves, so saved checkpoints have upstream's layout.
"""

from __future__ import annotations

import sys
import threading
from copy import deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from veomni_hook.patches.mapped import Replacement

__all__ = ["serve_conversions"]

_NAME = "get_model_conversion_mapping"
_LOCK = threading.Lock()


def serve_conversions(instances: Callable[[Any], Iterable[Replacement]]) -> None:
    """Let transformers use the conversions of the mapped classes that ``instances`` finds in a model.

    Changes ``transformers.conversion_mapping`` and the loaded modules that import its function.
    """
    from transformers import conversion_mapping

    with _LOCK:
        upstream = getattr(conversion_mapping, _NAME)
        if hasattr(upstream, "veomni_upstream"):
            return
        ours = _with_ours(upstream, instances)
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and vars(module).get(_NAME) is upstream:
                setattr(module, _NAME, ours)


def _with_ours(upstream: Any, instances: Callable[[Any], Iterable[Replacement]]) -> Any:
    @wraps(upstream)
    def get_model_conversion_mapping(model: Any, *args: Any, **kwargs: Any) -> list[Any]:
        found = upstream(model, *args, **kwargs)
        mapped = [one for one in instances(model) if one.weights]
        if mapped and getattr(model, "hf_quantizer", None) is not None:
            raise CheckpointError(
                f"{mapped[0].name} has conversions of weights, and the model is quantised",
                where=mapped[0].where,
                fix="load without quantisation, or inside use_mapped_classes(on=False)",
            )
        # First, because transformers uses the first converter that fits a name.
        return [*(each for one in mapped for each in _conversions(one)), *found]

    get_model_conversion_mapping.veomni_upstream = upstream  # type: ignore[attr-defined]
    return get_model_conversion_mapping


def _conversions(mapped: Replacement) -> list[Any]:
    made = mapped.named(mapped.weights)
    # Copied: transformers collects tensors in these objects.
    return list(made()) if callable(made) else deepcopy(list(made))

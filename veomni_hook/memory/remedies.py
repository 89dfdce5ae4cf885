"""Settings that lower the memory of a step, as what they change of a model: to predict the step with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as upstream

from veomni_hook.kernels.shared.changed import changed
from veomni_hook.memory import checkpoint, parts

__all__ = ["REMEDIES", "checkpoint_layers", "layers_of", "of_one_row", "with_setting"]

Remedy = Callable[[nn.Module], AbstractContextManager[None] | None]


def _checkpointed(model: nn.Module) -> AbstractContextManager[None] | None:
    """Return a block with upstream's checkpoints; None: layers are checkpointed, or cannot be."""
    able = layers_of(model)
    if not able or any(layer.gradient_checkpointing for layer in able):
        return None
    return _with_checkpoints(able, partial(upstream, use_reentrant=False))


def with_setting(text: str, model: nn.Module) -> AbstractContextManager[None] | None:
    """Return a block with the setting ``memory``; None: it is in force, or patched text has no place."""
    places = hasattr(sys.modules.get("transformers.modeling_utils"), "veomni_chosen")
    able = layers_of(model)
    if not places or not able:
        return None
    if parts.is_in_force(text) and all(layer.gradient_checkpointing for layer in able):
        return None
    return _with_checkpoints(able, checkpoint.run, parts.parsed(text))


def layers_of(model: nn.Module) -> list[Any]:
    """Return the modules whose layers can be checkpointed, and these layers."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def checkpoint_layers(layers: list[Any]) -> None:
    """Let this package's checkpoint call the layers."""
    for layer in layers:
        vars(layer).update(_called_by(checkpoint.run))


@contextmanager
def _with_checkpoints(
    layers: list[Any], function: Callable[..., Any], asked: parts.Parts | None = None
) -> Iterator[None]:
    """Let ``function`` call the layers in the block, with the parts ``asked`` in force, if any are."""
    with ExitStack() as stack:
        if asked is not None:
            stack.enter_context(parts.using(asked))
        for layer in layers:
            stack.enter_context(changed(vars(layer), _called_by(function)))
        yield


def _called_by(function: Callable[..., Any]) -> dict[str, object]:
    """Return the attributes with which ``function`` calls the layers of a module."""
    return {"gradient_checkpointing": True, "_gradient_checkpointing_func": function}


def of_one_row(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the batch with its first sequence alone; None: it has no other."""
    rows = max((value.shape[0] for value in inputs.values() if getattr(value, "ndim", 0) > 1), default=1)
    if rows == 1:
        return None
    return {
        name: value[:1] if getattr(value, "ndim", 0) and value.shape[0] == rows else value
        for name, value in inputs.items()
    }


#: By what users are told, in the order in which they should be tried. Each stands alone.
REMEDIES: dict[str, Remedy] = {
    "gradient_checkpointing=True": _checkpointed,
    **{f"VEOMNI_MEMORY={text}": partial(with_setting, text) for text in parts.LADDER},
}

"""Settings that lower the memory of a step, as what they change of a model: to predict the step with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

__all__ = ["REMEDIES", "checkpointed", "of_one_row"]

Remedy = Callable[[nn.Module], AbstractContextManager[None] | None]


def checkpointed(model: nn.Module) -> AbstractContextManager[None] | None:
    """Return a block in which the layers of ``model`` are checkpointed; None: they are, or cannot be."""
    own: Any = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # these names, in releases that have others
        possible = getattr(own, "supports_gradient_checkpointing", False)
        if not possible or own.is_gradient_checkpointing:
            return None
    return _checkpointed(own)


@contextmanager
def _checkpointed(model: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_disable()


def of_one_row(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the batch with its first sequence alone; None: it has no other."""
    rows = max((value.shape[0] for value in inputs.values() if getattr(value, "ndim", 0) > 1), default=1)
    if rows == 1:
        return None
    return {
        name: value[:1] if getattr(value, "ndim", 0) and value.shape[0] == rows else value
        for name, value in inputs.items()
    }


#: By what users are told, in the order in which they should be tried.
REMEDIES: dict[str, Remedy] = {"gradient_checkpointing=True": checkpointed}

"""How many tokens a call of a model gets, from the shapes of its arguments; no value is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["tokens_of"]


def tokens_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of a call, including padding, or None if no argument shows it.

    Counts ``input_ids`` (or the first positional argument if it holds integers ``[batch, length]``), else
    ``inputs_embeds``, else ``labels``. For an encoder-decoder, adds the decoder's tokens.
    """
    own = _count(kwargs, "input_ids", "inputs_embeds")
    if own is None and args:
        own = _ids(args[0])
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        other = _count(kwargs, "decoder_input_ids", "decoder_inputs_embeds", "labels")
        return other if own is None else own + (other or 0)
    if own is not None:
        return own
    return _ids(kwargs.get("labels"))


def _count(kwargs: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor):
            shape = value.shape[:-1] if name.endswith("inputs_embeds") else value.shape
            return int(shape.numel())
    return None


def _ids(value: Any) -> int | None:
    """The size of a tensor of integers ``[batch, length]``; None for anything else."""
    if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
        return int(value.numel())
    return None

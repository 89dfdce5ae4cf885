"""What transformers captures inside the layers (router logits, hidden states), completed over the group.

Forward hooks put it into a collector while the layers run, so each process has its own positions. It becomes
part of a model's output when the base model returns.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from veomni_hook.errors import ParallelError
from veomni_hook.parallel.collectives import gathered, part_length
from veomni_hook.parallel.groups import SequenceGroup

__all__ = ["HIDDEN_STATES", "captured", "check_captured", "gather_captured"]

_MODULE = "transformers.utils.output_capturing"
HIDDEN_STATES = "hidden_states"
_SUPPORTED = ("router_logits", HIDDEN_STATES)


def check_captured(model: str) -> None:
    """Raise if an output is requested that a split model cannot give.

    Raises:
        ParallelError: attention weights are requested, or another output of the layers that is unknown.
    """
    for key in captured():
        if key not in _SUPPORTED and not key.startswith("_"):
            raise ParallelError(
                f"{model} was asked for `{key}`, of which each process has a part only",
                where=f"{model}.forward, with sequences that several processes share",
                fix=f"do not request output_{key} in training, or set VEOMNI_PARALLEL without sp",
            )


def gather_captured(length: int, group: SequenceGroup) -> None:
    """Replace what was captured by its value for all ``length`` positions."""
    wanted = captured()
    for key in _SUPPORTED:
        values = wanted.get(key, ())
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):  # [batch, part, width] or [batch * part, width]
                own = value.reshape(-1, part_length(length, group), value.shape[-1])
                whole = gathered(own, 1, length, group)
                values[place] = whole if value.dim() == 3 else whole.flatten(0, 1)


def captured() -> dict[str, Any]:
    """Return transformers' collector of this forward pass, by what it captures; empty if there is none."""
    collector = getattr(sys.modules.get(_MODULE), "_active_collector", None)
    if collector is None or is_dynamo_compiling():
        return {}
    return collector.get() or {}

"""Scores of the one position in each row that a sequence classifier uses.

Upstream scores every position and picks one in each row. Here it picks from a `Scores`, which scores only
the picked positions. The module ``score`` is kept as it is (LoRA-wrapped, with quantised weights), unless it
rounds a position by what the others contain, as dynamic float8 does with one scale for its whole input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from veomni_hook.kernels.linear_cross_entropy.head import calls_refuse
from veomni_hook.kernels.shared.module_calls import is_linear
from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.kernels.shared.origin import written_in

__all__ = ["Scores", "refuses"]

#: Modules and packages (adapters, quantised projections) whose classes treat each row independently.
_BY_ROW: tuple[type, ...] = (nn.Identity, nn.Dropout, nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BY_ROW += (nn.ParameterDict, nn.GELU, nn.ReLU, nn.SiLU, nn.Sigmoid, nn.Tanh)
_PACKAGES = ("peft.", "bitsandbytes.", "transformers.integrations.", "gptqmodel.", "awq.")
#: Except these: LLM.int8() keeps a column in 16 bits if any row has an outlier there.
_ACROSS_ROWS = ("Linear8bitLt",)
_LOSS_HOME = ("transformers.loss.loss_utils", "ForSequenceClassificationLoss")


class Scores:
    """Replaces ``score(hidden_states)`` for code that reads its device and shape and indexes rows.

    ``hidden_states`` are ``[batch, length, hidden]``; scores are computed when they are indexed.
    """

    def __init__(self, hidden_states: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._hidden_states = hidden_states
        self._score = score

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self._hidden_states.device

    @property
    def shape(self) -> torch.Size:
        """Batch and length."""
        return self._hidden_states.shape[:-1]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the scores ``[rows, labels]`` at ``index``, a pair (rows, positions)."""
        return self._score(self._hidden_states[index])


def _may_mix_rows(module: nn.Module) -> str | None:
    """Return what in ``module`` is not known to compute each position independently, or None."""
    kind = type(module)
    if is_linear(kind):
        weight = module._parameters.get("weight")
        shard = getattr(weight, "_local_tensor", weight)  # what a rank holds of a sharded weight
        return (
            None if shard is None or not_plain(shard) is None else f"weight of class {type(shard).__name__}"
        )
    known = kind in _BY_ROW or (kind.__module__.startswith(_PACKAGES) and kind.__name__ not in _ACROSS_ROWS)
    return None if known else kind.__name__


def refuses(owner: object, hidden_states: torch.Tensor, score: object) -> str | None:
    """Return why all positions must be scored, or None."""
    if not isinstance(score, nn.Module):
        return f"score is a {type(score).__name__}, not a module"
    for module in score.modules():
        if (reason := calls_refuse(module)) is not None:
            return reason
        if (mixing := _may_mix_rows(module)) is not None:
            return f"score contains a {mixing}, which may read more than one position"
    loss_function = getattr(owner, "loss_function", None)
    if loss_function is not None and (home := written_in(loss_function)) != _LOSS_HOME:
        return f"the model has its own loss_function ({'.'.join(home)})"
    return None

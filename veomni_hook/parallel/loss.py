"""The fused loss over rows that a sequence group shares: each process computes the loss of its part.

The rows are those that `gather` returns: every process has all of them, so any division is right. With this,
no process repeats the products of the head. Upstream's loss and other heads repeat them.

If the loss gets what `gather` returned, and nobody can see its gradient, it takes the positions that went in:
then their gradient is not exchanged, and none of all positions is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from veomni_hook.kernels.linear_cross_entropy.shares import SHARED
from veomni_hook.parallel import process
from veomni_hook.parallel.captured import captured
from veomni_hook.parallel.collectives import all_averaged, own_part
from veomni_hook.parallel.groups import SequenceGroup
from veomni_hook.parallel.sharding import sharding_of

__all__ = ["attach", "note_part"]

_PART = "_veomni_part"
_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class _Rows:
    group: SequenceGroup
    #: Modules in a model, from a part of it to its base model, whose output is what the loss gets.
    path: tuple[torch.nn.Module, ...]

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def own_positions(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        part, layout = getattr(_root(hidden_states), _PART, (None, None))
        # Hooks may want the gradient of all positions, as FSDP2's do where the module is a unit.
        seen = any(getattr(module, name) for module in self.path for name in _HOOKS)
        return part if layout == _layout(hidden_states) and not seen else None

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        return own_part(x, 1, self.group)

    def all_averaged(self, x: torch.Tensor) -> torch.Tensor:
        return all_averaged(x, self.group)


def attach() -> None:
    """Let the fused loss ask which models share their rows."""
    SHARED.find = _find


def note_part(whole: torch.Tensor, part: torch.Tensor, group: SequenceGroup) -> None:
    """Note that ``part`` is this process's positions of ``whole``, the output of a base model.

    Not if the caller gets it among hidden states, and may ask for its gradient.
    """
    if "hidden_states" not in captured() and part.shape[1] * group.size == whole.shape[1]:
        setattr(_root(whole), _PART, (part, _layout(whole)))


def _root(x: torch.Tensor) -> torch.Tensor:
    return x if x._base is None else x._base


def _layout(x: torch.Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x._version


def _find(model: object) -> _Rows | None:
    """Return the group of a model whose base model is split, or None."""
    if process.sizes().sp == 1 or not torch.is_grad_enabled() or not isinstance(model, torch.nn.Module):
        return None
    for name, module in model.named_modules():
        if (sharding := sharding_of(module)) is not None:
            places = [place for place, letter in enumerate(name) if letter == "."]
            path = (*(model.get_submodule(name[:place]) for place in places), module)
            return _Rows(sharding.group, path)
    return None

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
from veomni_hook.parallel.captured import HIDDEN_STATES, captured
from veomni_hook.parallel.collectives import all_averaged, own_part
from veomni_hook.parallel.groups import SequenceGroup
from veomni_hook.parallel.sharding import sharding_of

__all__ = ["attach", "note_part"]

_ATTRIBUTE = "_veomni_part"
_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class _Noted:
    """What a gathered tensor, the output of ``base``, was in this process."""

    base: torch.nn.Module
    part: torch.Tensor
    layout: tuple[object, ...]

    def __reduce__(self) -> tuple[object, ...]:
        # A tensor that is saved leaves it behind, and can be loaded with `weights_only`.
        return torch.Size, ((),)


@dataclass(frozen=True)
class _Rows:
    rank: int
    size: int
    group: SequenceGroup
    model: torch.nn.Module

    def own_positions(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        noted = getattr(_root(hidden_states), _ATTRIBUTE, None)
        if not isinstance(noted, _Noted) or noted.layout != _layout(hidden_states):
            return None
        path = _path(self.model, noted.base)
        # Hooks may want the gradient of all positions, as FSDP2's do where the module is a unit.
        hooks = [getattr(module, name) for module in path for name in _HOOKS]
        return noted.part if path and not any(hooks) else None

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        return own_part(x, 1, self.group)

    def all_averaged(self, x: torch.Tensor) -> torch.Tensor:
        return all_averaged(x, self.group)


def attach() -> None:
    """Let the fused loss ask which models share their rows."""
    SHARED.find = _find


def note_part(base: torch.nn.Module, whole: torch.Tensor, part: torch.Tensor, group: SequenceGroup) -> None:
    """Note that ``part`` is this process's positions of ``whole``, the output of a base model.

    Not if the caller gets it among hidden states, and may ask for its gradient.
    """
    if HIDDEN_STATES not in captured() and part.shape[1] * group.size == whole.shape[1]:
        setattr(_root(whole), _ATTRIBUTE, _Noted(base, part, _layout(whole)))


def _root(x: torch.Tensor) -> torch.Tensor:
    return x if x._base is None else x._base


def _layout(x: torch.Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x._version


def _path(model: torch.nn.Module, base: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules inside of ``model`` that hold ``base``, and ``base``; none if it is elsewhere."""
    name = next((name for name, module in model.named_modules() if module is base), "")
    ends = [place for place, letter in enumerate(f"{name}.") if letter == "."]
    return [model.get_submodule(name[:end]) for end in ends] if name else []


def _find(model: object) -> _Rows | None:
    """Return the group of a model whose base model is split, or None."""
    if process.sizes().sp == 1 or not torch.is_grad_enabled() or not isinstance(model, torch.nn.Module):
        return None
    shardings = (sharding_of(module) for module in model.modules())
    group = next((sharding.group for sharding in shardings if sharding is not None), None)
    return None if group is None else _Rows(group.rank, group.size, group, model)

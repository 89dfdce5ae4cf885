"""Attention that chooses among its keys: each process has its own queries, and the keys of all positions.

An indexer scores all keys, and a compressor pools windows of positions. Both ask the layer's cache for what
is in front of their positions. So patched attention gets a cache that answers with all positions: keys, which
are few (latent, or shared by all heads), are gathered before upstream's code expands, pools or scores them.
Masks and positions are those of this process's queries. Nothing else of upstream's code changes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from veomni_hook.parallel.collectives import gathered, own_part
from veomni_hook.parallel.groups import SequenceGroup
from veomni_hook.parallel.sharding import in_force, refuse
from veomni_hook.patches.upstream_names import KEPT, names

__all__ = ["has_whole_keys", "own_queries", "whole_keys"]

_MARK = "_veomni_whole_keys"
#: An empty cache of the layer of each module of attention.
_EMPTY: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def whole_keys(
    module: nn.Module, hidden_states: torch.Tensor, cache: object, mask: Any, *positions: Any
) -> tuple[Any, ...]:
    """Return the cache, mask and positions with which ``module`` attends from this process's positions.

    The very same objects if its sequences are not split.

    Args:
        module: attention.
        hidden_states: ``[batch, part of the positions, hidden]``.
        cache: upstream's, which is not used.
        mask: of all positions, ``[batch, heads or 1, queries, keys]`` or ``[batch, positions]``; or None.
        positions: of all positions, ``[..., positions]``; or keyword arguments that may hold them.

    Raises:
        ParallelError: the mask is another one.
    """
    sharding = in_force(module)
    if sharding is None:
        return (cache, mask, *positions)
    group, part = sharding.group, hidden_states.shape[1]
    told = mask.shape[-1] if isinstance(mask, torch.Tensor) else None
    full = sharding.positions(part, told, causal=True)
    setattr(module, _MARK, True)
    rows = _rows(module, mask, part, full, group, hidden_states.device)
    return (_Keys(module, group, part, full), rows, *(_part(value, group) for value in positions))


def has_whole_keys(module: nn.Module) -> bool:
    """Return whether ``module`` attends from a part of the positions to all of them."""
    return getattr(module, _MARK, False) is True


def own_queries(module: nn.Module, query: torch.Tensor, key: torch.Tensor, mask: Any) -> None:
    """Raise unless an implementation is given the mask of these queries ``[.., queries, .]`` and keys.

    Raises:
        ParallelError: it would guess which keys a query sees.
    """
    expected = [query.shape[2], key.shape[2]]
    if not isinstance(mask, torch.Tensor) or [*mask.shape[-2:]] != expected:
        said = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        refuse(module, f"its mask is {said}, not one of {expected[0]} queries and {expected[1]} keys")


class _Keys:
    """A cache, and its layer of one module: empty in front of the keys that it gathers."""

    def __init__(self, module: nn.Module, group: SequenceGroup, part: int, full: int) -> None:
        if module not in _EMPTY:
            from transformers import DynamicCache

            config: Any = module.config
            _EMPTY[module] = DynamicCache(config=config).layers[module.layer_idx]
        self._layer, self._group, self._part, self._full = deepcopy(_EMPTY[module]), group, part, full

    @property
    def layers(self) -> _Keys:
        """What stands for every layer: modules ask for their own."""
        return self

    def __getitem__(self, layer: int) -> _Keys:
        return self

    def get_seq_length(self, *_: object) -> int:
        """Return the number of positions up to this process's last query."""
        return self._part * (self._group.rank + 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # of a copy that is not made yet
        found = getattr(self._layer, name)
        return partial(self._gathered, found) if name in KEPT else found

    def _gathered(self, method: Callable[..., Any], *states: Any, **_: object) -> Any:
        """Call a method of the layer with all positions; a cache's method is also told which layer."""
        # The keys may be the values.
        whole = {
            id(state): gathered(state, -2, self._full, self._group)
            for state in {id(state): state for state in states}.values()
            if isinstance(state, torch.Tensor)
        }
        return method(*(whole.get(id(state), state) for state in states if not isinstance(state, int)))


def _rows(
    module: nn.Module, mask: Any, part: int, full: int, group: SequenceGroup, device: torch.device
) -> torch.Tensor:
    """Return the rows of a mask for this process's queries."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return own_part(mask, 1, group)
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:
        return mask if mask.shape[2] == 1 else own_part(mask, 2, group)
    config: Any = module.config
    if mask is not None or config._attn_implementation != "sdpa":
        refuse(module, f"its mask is a {type(mask).__name__}: choose sdpa or eager attention")
    # torch's fused attention takes no mask for that of causal attention, with as many queries as keys.
    queries = torch.arange(part, device=device) + group.rank * part
    return (torch.arange(full, device=device) <= queries[:, None])[None, None]


def _part(positions: Any, group: SequenceGroup) -> Any:
    if isinstance(positions, torch.Tensor):
        return own_part(positions, -1, group)
    if isinstance(positions, dict):
        known = names("positions")
        return {name: _part(value, group) if name in known else value for name, value in positions.items()}
    return positions

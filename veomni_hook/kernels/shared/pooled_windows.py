"""Modules that pool windows of positions into keys: called for each sample alone, and with all their weights.

Such a module returns keys ``[rows, heads, windows, width]``, and what attention adds to the scores of them,
``[rows, 1, positions, windows]``, or None where every position sees all. It drops what fills no window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import distributed, nn
from torch.nn import functional

from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared.host_values import traced
from veomni_hook.kernels.shared.samples import ends_of, of_rows
from veomni_hook.kernels.shared.separation import (
    expect_boundaries,
    given_in,
    given_of,
    inseparable,
    layer_of,
)
from veomni_hook.kernels.shared.sharded import has_units, is_sharded

__all__ = ["separated"]

#: What such a module returns.
Pooled: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


class _Call(NamedTuple):
    """A module that is called, and what is known of the call.

    Attributes:
        owner: the attention that calls it.
        module: the module.
        mask: of the attention, which the result extends.
        cache: the argument that is the cache, or None.
        size: positions of a window.
    """

    owner: Any
    module: nn.Module
    mask: object
    cache: object
    size: int


def separated(
    owner: nn.Module,
    kwargs: Mapping[str, Any],
    module: nn.Module,
    mask: object,
    cache: object,
    size: str,
) -> Callable[..., Pooled]:
    """Return what computes the keys of ``module`` from the same arguments: those of each sample by itself.

    Where processes share the module's weights and no sample fills a window, the weights take part with
    gradients of zero: other processes wait for them.

    Args:
        owner: the attention that calls.
        kwargs: its arguments without a name, which may have boundaries of samples.
        module: what it calls.
        mask: its mask, to which it appends what the module returns.
        cache: the argument that is the cache.
        size: the attribute of the module that is the number of positions of a window.

    Raises:
        SamplesError: when called, if samples share a row and cannot be kept apart.
    """
    if not STATE.active:
        return module
    call = _Call(owner, module, mask, cache, getattr(module, size))
    if given_in(kwargs):
        # Boundaries are values, which compiled code does not have.
        return partial(_eagerly if traced() else _by_sample, call, kwargs)
    expect_boundaries(owner, kwargs)
    return partial(_with_weights, call)


def _by_sample(call: _Call, kwargs: Mapping[str, Any], *args: Any) -> Pooled:
    rows, positions = args[0].shape[:2]
    ends, numbers = given_of(kwargs)
    # The positions of a row: the model has checked that boundaries divide its rows.
    length: int = numbers.shape[1] if ends is None else ends_of(ends)[-1] // rows
    bounds = of_rows(rows, length, ends, numbers)
    if bounds is None:
        return _with_weights(call, *args)
    _check(call, length, positions)
    places = pairwise(ends_of(bounds))
    parts = [_Part(start // positions, start % positions, end - start) for start, end in places]
    # One that fills no window has no keys.
    filling = [part for part in parts if part.length >= call.size] or parts[:1]
    pooled = [(part, *_with_weights(call, *part.of(args, positions))) for part in filling]
    return _joined(call, pooled, rows, positions)


_eagerly: Callable[..., Pooled] = torch.compiler.disable(_by_sample)  # type: ignore[no-untyped-call]


class _Part(NamedTuple):
    """A sample: its row, where it begins there, and its positions."""

    row: int
    begin: int
    length: int

    def of(self, args: tuple[Any, ...], positions: int) -> Iterator[Any]:
        """Yield arguments with the sample's positions of those ``[rows or 1, positions, ...]``."""
        for value in args:
            if _has_positions(value, positions):
                row = self.row if value.shape[0] > 1 else 0
                yield value[row : row + 1, self.begin : self.begin + self.length]
            else:
                yield value


def _check(call: _Call, length: int, positions: int) -> None:
    """Raise SamplesError if samples cannot be kept apart."""
    if length != positions:
        raise _mixed(call, f"it has {positions} of {length} positions of a row", "do not split sequences")
    if call.cache is not None:
        raise _mixed(call, "a cache holds windows of the whole row", "pass use_cache=False and no cache")
    if not isinstance(call.mask, torch.Tensor):
        why = f"its mask is a {type(call.mask).__name__}, which does not tell which keys a position sees"
        raise _mixed(call, why, "choose eager attention")
    if has_units([call.module]):
        why = "the module that pools them is a unit of FSDP, which all processes must call equally often"
        raise _mixed(call, why, "put the layer into one unit")


def _mixed(call: _Call, why: str, fix: str) -> Exception:
    return inseparable("", layer_of(call.owner), why, fix)


def _joined(
    call: _Call, pooled: list[tuple[_Part, torch.Tensor, torch.Tensor | None]], rows: int, positions: int
) -> Pooled:
    """Return the keys of all samples, row by row, and what lets each sample see its own alone."""
    like = pooled[0][1]
    by_row = [[keys for part, keys, _ in pooled if part.row == row] for row in range(rows)]
    counts = [sum(keys.shape[2] for keys in row) for row in by_row]
    most = max(counts)
    lines = [
        # Rows have equally many keys; nothing sees those that are added.
        torch.cat([*row, like.new_zeros(1, like.shape[1], most - count, like.shape[3])], 2)
        for row, count in zip(by_row, counts, strict=True)
    ]
    joined = torch.cat(lines)
    if not most:
        return joined, None
    bias = like.new_full((rows, 1, positions, most), float("-inf"))
    first = [0] * rows
    for part, keys, own in pooled:
        at, first[part.row] = first[part.row], first[part.row] + keys.shape[2]
        place = (
            part.row,
            slice(None),
            slice(part.begin, part.begin + part.length),
            slice(at, first[part.row]),
        )
        bias[place] = 0.0 if own is None else own[0]
    return joined, bias


def _with_weights(call: _Call, *args: Any) -> Pooled:
    """Call the module; where no window is full and other processes wait for its weights, with padding."""
    if args[0].shape[1] < call.size and _is_awaited(call.module):
        return _padded(call, call.module, args) if call.cache is None else _with_cache(call, *args)
    pooled: Pooled = call.module(*args)
    return pooled


@torch.compiler.disable
def _with_cache(call: _Call, *args: Any) -> Pooled:
    def again(module: nn.Module, args: tuple[Any, ...], pooled: Pooled) -> Pooled:
        return pooled if pooled[0].shape[2] else _padded(call, module.forward, args)

    # Only the cache knows whether a window is full. A second call of a unit of FSDP would be one more than
    # other processes make: what the first call runs, before the unit lets go of its weights, runs again.
    hook = call.module.register_forward_hook(again, prepend=True)
    try:
        pooled: Pooled = call.module(*args)
    finally:
        hook.remove()
    return pooled


def _padded(call: _Call, function: Callable[..., Pooled], args: tuple[Any, ...]) -> Pooled:
    """Return no keys, on a path of gradients, which are zero; the cache stays as it is."""
    positions = args[0].shape[1]
    padded = [
        functional.pad(value, (*(0, 0) * (value.dim() - 2), 0, call.size - positions))
        if _has_positions(value, positions)
        else None
        if value is call.cache
        else value
        for value in args
    ]
    return function(*padded)[0][:, :, :0], None


def _has_positions(value: object, positions: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == positions


@torch.compiler.disable
def _is_awaited(module: nn.Module) -> bool:
    """Return whether other processes wait for gradients of a module's weights."""
    shares = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters())
    return shares and trains and is_sharded([module])

"""Linear attention over sequences that several processes share.

The convolution in front of a rule reads a few positions back: each process gets the last positions of the one
before it. The rule reads everything in front of a position: positions are exchanged for heads, as around
attention, so each process runs it over whole sequences with its share of the heads. `over_sequence` is the
outermost: below it, kernels and upstream's functions see ordinary calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn

from veomni_hook.kernels.shared.host_values import derived, traced
from veomni_hook.kernels.shared.samples import boundaries, ends_of, of_rows
from veomni_hook.kernels.shared.separation import NAMES, given_in, given_of, layer_of
from veomni_hook.kernels.shared.whole_sequences import SEQUENCES
from veomni_hook.parallel.collectives import gathered, part_length, to_heads, to_positions
from veomni_hook.parallel.groups import SequenceGroup, choices
from veomni_hook.parallel.sharding import Sharding, in_force, refuse

__all__ = ["attach", "over_sequence"]

Call = Callable[..., Any]
Named = dict[str, Any]


def attach() -> None:
    """Let calls of convolutions and rules ask which modules have a part of the positions."""
    SEQUENCES.wrap = over_sequence


def over_sequence(op: str, owner: nn.Module, call: Callable[..., object]) -> Call:
    """Return ``call``, with upstream's arguments, for a module whose sequences several processes share.

    Args:
        op: ``causal_conv`` or ``gated_delta_rule``.
        owner: the module that calls.
        call: what runs with whole sequences, or with the positions that a convolution reads.

    The result raises ParallelError, with the layer's name, if the group's size does not divide the value
    heads, if a cache holds a state, or if the convolution in front of a rule was not exchanged.
    """
    sharding = in_force(owner)
    if sharding is None:
        return call
    run = _convolved if op == "causal_conv" else _recurred
    return partial(_outside_of_graphs, run, call, owner, sharding)


def _outside_of_graphs(run: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    # Boundaries are values, which compiled code does not have.
    if given_in(kwargs) and traced():
        return _eagerly(run, *args, **kwargs)
    return run(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eagerly(run: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    return run(*args, **kwargs)


def _convolved(
    call: Callable[..., torch.Tensor],
    owner: nn.Module,
    sharding: Sharding,
    /,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *others: object,
    **named: object,
) -> torch.Tensor:
    """Return the convolution ``[rows, channels, part]``; ``weight`` is ``[channels, taps]``."""
    group = sharding.group
    # An empty cache fills up short inputs, in front.
    part = part_length(sharding.full, group) if sharding.in_layers else hidden_states.shape[2]
    x, reads = hidden_states[:, :, -part:], weight.shape[1] - 1
    if reads:
        x = torch.cat([_last_of_others(x, reads, group), x], 2)
    bounds, rest = _samples(sharding, x.shape[0], part, named)
    if bounds is not None:
        full = ends_of(bounds)[-1] // x.shape[0]
        local = derived(bounds, _local, full, group.rank * part - reads, part + reads, bounds.device)
        rest = rest if local is None else {**rest, "cu_seqlens": local}
    output = call(x, weight, *others, **rest)
    sharding.note_convolution(owner)
    return output[:, :, reads:]


def _last_of_others(x: torch.Tensor, count: int, group: SequenceGroup) -> torch.Tensor:
    """Return the ``count`` positions in front of ``x``, zeros in front of a sequence.

    If processes have fewer than ``count`` positions, they come from several of them.
    """
    last = min(count, x.shape[2])
    everyones = gathered(x[:, :, -last:], 2, last * group.size, group)
    # The first process takes nothing of it, but it has a part in the backward pass as all others.
    return nn.functional.pad(everyones, (count, 0)).narrow(2, group.rank * last, count)


def _local(
    ends: torch.Tensor, full: int, start: int, length: int, device: torch.device
) -> torch.Tensor | None:
    """Return the boundaries in positions ``start`` to ``start + length`` of each row; None: there is none.

    ``ends`` are those of rows of ``full`` positions. What is in front of a row is zeros, as in front of a
    sample, so its beginning is no boundary.
    """
    rows = int(ends[-1]) // full
    places = [divmod(end, full) for end in ends.tolist()]
    inside = {row * length + place - start for row, place in places if place and 0 < place - start < length}
    if not inside:
        return None
    return boundaries(sorted(inside | {row * length for row in range(rows + 1)}), device)


def _recurred(  # noqa: PLR0913, PLR0917 - upstream's operands
    call: Callable[..., tuple[torch.Tensor, object]],
    owner: nn.Module,
    sharding: Sharding,
    /,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *others: object,
    **named: object,
) -> tuple[torch.Tensor, object]:
    """Return the rule ``[rows, part, heads, width]``, and the state of this process's heads or None."""
    group, (rows, part, heads, _) = sharding.group, value.shape
    _check(owner, sharding, key, value, named)
    bounds, rest = _samples(sharding, rows, part, named)
    if bounds is None:
        full = sharding.positions(part, None, causal=True)
    else:
        full, rest = ends_of(bounds)[-1] // rows, {**rest, "cu_seqlens": bounds}
    repeats = group.size // gcd(group.size, key.shape[2])
    if repeats > 1:
        query, key = (operand.repeat_interleave(repeats, 2) for operand in (query, key))
    # A decay for each channel has a dimension of its own. In one dimension and back, gradients get dense
    # strides: those that compiled code expects of them.
    decays, channels = g.dim(), g.shape[3:] or (1,)
    numbers = (g.reshape(-1).view(*g.shape[:3], *channels), beta.reshape(-1).view(*beta.shape, 1))
    parts = [number.transpose(1, 2) for number in (query, key, value, *numbers)]
    *wide, g, beta = (exchanged[:, :, :full].transpose(1, 2) for exchanged in to_heads(parts, group))
    g = g if decays == 4 else g.squeeze(3)
    output, state = call(*wide, g, beta.squeeze(3), *others, **rest)
    sharding.note_call()
    if output.dim() != 4 or output.shape[1:3] != (full, heads // group.size):
        what = f"its rule returns {list(output.shape)} for {full} positions"
        refuse(owner, what, where=layer_of(owner))
    missing = part * group.size - full
    if missing:
        output = nn.functional.pad(output, (0, 0, 0, 0, 0, missing))
    return to_positions(output, group), state


def _check(
    owner: nn.Module, sharding: Sharding, key: torch.Tensor, value: torch.Tensor, named: dict[str, object]
) -> None:
    """Raise if the exchange would not be right for this call."""
    group, heads, keys = sharding.group, value.shape[2], key.shape[2]
    reason = advice = ""
    if heads % group.size:
        reason = f"sp={group.size} does not divide its {heads} value heads"
        advice = f"{choices(heads, group.mesh.size())}, or "
    elif heads % keys:
        reason = f"it has {keys} key heads for {heads} value heads"
    elif named.get("initial_state") is not None:
        reason = "its cache holds a state already"
    elif not sharding.has_convolved(owner):
        reason = "the convolution in front of its rule saw a part of the sequence alone"
    if reason:
        refuse(owner, reason, where=layer_of(owner), advice=advice)


def _samples(sharding: Sharding, rows: int, part: int, named: Named) -> tuple[torch.Tensor | None, Named]:
    """Return the boundaries of samples in whole rows, or None, and the arguments without them."""
    rest = {name: argument for name, argument in named.items() if name not in NAMES}
    if not given_in(named):
        return None, rest
    ends, numbers = given_of(named)
    told = int(numbers.shape[-1]) if ends is None else ends_of(ends)[-1] // rows
    full = sharding.positions(part, told, causal=True)
    return of_rows(rows, full, ends, numbers), rest

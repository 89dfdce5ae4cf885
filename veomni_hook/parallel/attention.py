"""Attention over sequences that several processes share: positions are exchanged for heads around it.

`over_sequence` wraps what transformers' table of attention implementations returns, so the wrapper is the
outermost: below it, upstream's functions, registered ones and this package's slots see whole sequences and
this process's share of the heads, with the mask as upstream built it.

Where that would repeat heads of keys, cut a head or cross hosts, only so many neighbours exchange as divide
the heads. Keys then go around a ring of such blocks, and attention is this package's (`ring_attention`).
If it does not know what the implementation computes, heads are exchanged among all, or the call is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn

from veomni_hook.kernels.shared.changed import changed
from veomni_hook.kernels.shared.operand_checks import dtype_of
from veomni_hook.parallel import process
from veomni_hook.parallel.collectives import part_length, to_heads, to_positions
from veomni_hook.parallel.formulas import Known, known
from veomni_hook.parallel.groups import SequenceGroup, choices, divided, neighbours
from veomni_hook.parallel.partial_attention import is_fused
from veomni_hook.parallel.ring_attention import ring_attention
from veomni_hook.parallel.sharding import Sharding, in_force, refuse
from veomni_hook.parallel.whole_keys import has_whole_keys, own_queries

__all__ = ["over_sequence", "own_random_numbers"]

Implementation = Callable[..., tuple[torch.Tensor, object]]
Operands = dict[str, Any]

#: Operands of some implementations that are per query, or per pair of positions: nobody splits them yet.
_REFUSED = ("position_bias", "head_mask", "indices", "block_indices", "cache")
#: Operands and attributes with one number a head.
_PER_HEAD_OPERANDS, _PER_HEAD_ATTRIBUTES = ("s_aux", "sinks"), ("sinks",)
_GROUPS = "num_key_value_groups"
_LARGEST_SEED = 2**62


def over_sequence(implementation: Implementation) -> Implementation:
    """Return ``implementation`` for modules whose sequences several processes share; the same if none do."""
    return implementation if process.sizes().sp == 1 else partial(_attend, implementation)


def _attend(
    implementation: Implementation,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *others: Any,
    **operands: Any,
) -> tuple[torch.Tensor, object]:
    sharding = in_force(module)
    if sharding is None:
        return implementation(module, query, key, value, attention_mask, *others, **operands)
    group = sharding.group
    if has_whole_keys(module):
        own_queries(module, query, key, attention_mask)
        sharding.note_call()
        with own_random_numbers(query, group.rank + 1 if module.training and operands.get("dropout") else 0):
            output, _ = implementation(module, query, key, value, attention_mask, *others, **operands)
        return output, None
    _check(module, query, key, value, operands)
    part, heads = query.shape[2], query.shape[1]
    if (near := neighbours(group.size, heads, key.shape[1])) < group.size:
        operands_of_ring = [operand.to(dtype_of(query)) for operand in (query, key, value)]
        call = known(implementation, module, query, attention_mask, others, operands)
        if isinstance(call, Known) and (heads % group.size or _pays(operands_of_ring, attention_mask, call)):
            sharding.note_call()
            return _around(call, sharding, near, module, operands_of_ring, attention_mask), None
        if heads % group.size:
            reason = f"sp={group.size} does not divide its {heads} heads, and {call}"
            refuse(module, reason, advice=f"{choices(heads, group.mesh.size())}, or ")
    full = _positions(sharding, module, part, attention_mask, operands)
    repeats = group.size // gcd(group.size, key.shape[1])
    if repeats > 1:
        key, value = (operand.repeat_interleave(repeats, 1) for operand in (key, value))
    query, key, value = (head[:, :, :full] for head in to_heads((query, key, value), group))
    mask, is_dense = attention_mask, isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4
    if is_dense and heads > 1 and mask.shape[1] == heads:
        mask = _of_heads(mask, 1, heads, group)
    operands = {
        name: _of_heads(operand, 0, heads, group)
        if name in _PER_HEAD_OPERANDS and operand is not None
        else operand
        for name, operand in operands.items()
    }
    dropout = operands.get("dropout", 0.0) if module.training else 0.0
    attributes = _of_own_heads(module, heads, repeats, group)
    with (
        changed(module.__dict__, attributes) if attributes else nullcontext(),
        own_random_numbers(query, group.rank + 1 if dropout else 0),
    ):
        output, _ = implementation(module, query, key, value, mask, *others, **operands)
    sharding.note_call()
    if output.dim() != 4 or output.shape[1:3] != (full, heads // group.size):
        refuse(module, f"its implementation returns {list(output.shape)} for {full} positions")
    missing = part * group.size - full
    if missing:
        output = nn.functional.pad(output, (0, 0, 0, 0, 0, missing))
    # Nobody has the weights of all heads.
    return to_positions(output, group), None


def _pays(operands: list[torch.Tensor], mask: torch.Tensor | None, call: Known) -> bool:
    """Return whether a ring is better than heads of keys that are repeated, or all-to-alls between hosts.

    On a GPU, where flash attention does not take a pair, the implementation below is faster by far.
    """
    query, _, value = operands
    return query.device.type == "cpu" or is_fused(query, value, mask, call.formula)


def _around(
    call: Known,
    sharding: Sharding,
    near: int,
    module: nn.Module,
    operands: list[torch.Tensor],
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention ``[batch, part, heads, width]``, with ``near`` neighbours for each block of keys."""
    group, (_, heads, part, _) = sharding.group, operands[0].shape
    told = None if mask is None else int(mask.shape[3])
    full = sharding.positions(part, told, causal=call.causal)
    if part_length(full, group) != part or told not in (None, full):
        refuse(module, f"it is given {part} positions of {full}, with a mask of {told}")
    around, ring = divided(group, near)
    query, key, value = to_heads(operands, around)
    if mask is not None and mask.shape[1] > 1:
        mask = _of_heads(mask, 1, heads, around)
    sinks = None if call.sinks is None else _of_heads(call.sinks, 0, heads, around)
    output = ring_attention(query, key, value, mask, sinks, call.formula, ring, full=full, causal=call.causal)
    return to_positions(output.transpose(1, 2), around)


def _positions(
    sharding: Sharding, module: nn.Module, part: int, mask: Any, operands: dict[str, object]
) -> int:
    """Return how many positions the implementation gets; see `Sharding.positions`."""
    causal = operands.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    told = None
    if mask is not None:
        told = int(mask.shape[-1])
    elif isinstance(numbers := operands.get("position_ids"), torch.Tensor):
        told = int(numbers.shape[-1])
    elif isinstance(ends := operands.get("cu_seq_lens_q"), torch.Tensor):
        known = sharding.known_lengths(part)
        # To read the number, the host waits.
        told = next(iter(known)) if len(known) == 1 else int(ends[-1])
    positions = sharding.positions(part, told, causal=bool(causal))
    if part_length(positions, sharding.group) != part:
        refuse(module, f"it is given {part} positions of {positions}")
    return positions


def _check(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    operands: dict[str, object],
) -> None:
    """Raise if the exchange would not be right for this call."""
    if key.shape[2] != query.shape[2] or value.shape[1:3] != key.shape[1:3]:
        refuse(
            module,
            f"it has {query.shape[2]} queries and {key.shape[2]} keys: a cache, a prefix or cross-attention",
        )
    for name in _REFUSED:
        if operands.get(name) is not None:
            refuse(module, f"it has the operand `{name}`, which nobody splits")


def _of_heads(x: torch.Tensor, dim: int, heads: int, group: SequenceGroup) -> torch.Tensor:
    """Return this process's share of ``heads`` along ``dim``."""
    share = heads // group.size
    return x.narrow(dim, group.rank * share, share)


def _of_own_heads(module: nn.Module, heads: int, repeats: int, group: SequenceGroup) -> dict[str, object]:
    """Return the attributes of ``module`` that are others for this process's heads.

    In the instance's dictionary, which is asked first: a parameter is not there.
    """
    own: dict[str, object] = {}
    if repeats > 1 and _GROUPS in module.__dict__:
        own[_GROUPS] = module.__dict__[_GROUPS] // repeats
    for name in _PER_HEAD_ATTRIBUTES:
        attribute = getattr(module, name, None)
        if isinstance(attribute, torch.Tensor) and attribute.shape[:1] == (heads,):
            own[name] = _of_heads(attribute, 0, heads, group)
    return own


@contextmanager
def own_random_numbers(like: torch.Tensor, offset: int) -> Iterator[None]:
    """Give this process random numbers of its own on the device of ``like``; offset 0 changes nothing.

    The new seed comes from the generator's own numbers, so a checkpoint that restores the generator gets the
    same numbers again. Afterwards the generator goes on as it would have without the block.
    """
    if not offset:
        yield
        return
    device = like.device
    if device.type == "cpu":
        seed = int(torch.randint(_LARGEST_SEED, ()))  # also: the next call starts elsewhere
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed((seed + offset) % _LARGEST_SEED)
            yield
        return
    backend = torch.get_device_module(device)
    generator = backend.default_generators[backend.current_device() if device.index is None else device.index]
    # Neither makes the host wait.
    seed, position = generator.initial_seed(), generator.get_offset()
    torch.empty((), device=device).uniform_()
    after = generator.get_state()
    try:
        generator.manual_seed((seed * 1_000_003 + position * 8191 + offset) % _LARGEST_SEED)
        yield
    finally:
        generator.set_state(after)

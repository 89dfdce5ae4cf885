"""Sequence parallelism in towers: each process runs the layers on its own images, frames or chunks of sound.

Every process of a group has the whole batch. What is computed before a tower's layers is computed by all;
the layers then run on a contiguous share of the segments between which attention never looks, and every
process gets all rows of the result. A tower that cannot be split in a call runs as a whole, in all processes
alike: the result is the same.

As in the text model, a pass is split if and only if gradients are enabled, and the average of a parameter's
gradients over all processes is the gradient of one process.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves, tree_map

from veomni_hook.kernels.shared.host_values import host_copies, host_copy, note_copy
from veomni_hook.parallel import process
from veomni_hook.parallel.agreement import check_same_batch
from veomni_hook.parallel.captured import captured
from veomni_hook.parallel.collectives import gathered_rows
from veomni_hook.parallel.groups import SequenceGroup, made_group, sequence_group

__all__ = ["Share", "gather", "replaced_layer", "shard"]

#: What a tower captures for each of its layers: nobody has it for all rows.
_CAPTURED = ("hidden_states", "attentions")
#: Packages whose modules and wrappers work on each row by itself, or run what is in the tower's file.
_KNOWN = ("accelerate", "peft", "torch", "transformers", "veomni_hook")


@dataclass(frozen=True)
class Share:
    """How the rows of a tower are shared.

    Attributes:
        counts: how many rows of the result come from each process.
        group: the processes.
    """

    counts: tuple[int, ...]
    group: SequenceGroup


def shard(
    module: nn.Module,
    hidden_states: torch.Tensor,
    boundaries: Sequence[torch.Tensor],
    *tables: object,
) -> tuple[object, ...]:
    """Return this process's share of what enters the layers of a tower, or the very same objects.

    Args:
        module: the tower.
        hidden_states: ``[rows, width]``.
        boundaries: integers, from 0 to the number of rows: attention stays between two neighbours. Layers may
            use several such tensors.
        tables: tensors ``[rows, width]``, or tuples or lists of such.

    Returns:
        What `gather` takes, the hidden states, each of the boundaries, each of the tables. A process whose
        share is empty gets the smallest segment, whose result nobody sees: its layers must run, because their
        parameters may be sharded.

    Raises:
        ParallelError: the processes have other batches, or the world cannot be divided.
    """
    whole = (None, hidden_states, *boundaries, *tables)
    if process.sizes().sp == 1 or not torch.is_grad_enabled() or is_dynamo_compiling():
        return whole
    group = _group(module)
    rows = hidden_states.shape[0]
    operands = tree_leaves((hidden_states, tables))
    if not all(isinstance(x, torch.Tensor) and x.dim() == 2 and len(x) == rows for x in operands):
        return whole
    if group is None or any(key in _CAPTURED for key in captured()) or replaced_layer(module):
        return whole
    ends = _ends(rows, boundaries)
    if len(ends) < 3:
        return whole  # one segment
    check_same_batch(module, hidden_states, group, first=False)
    cuts = _cuts(ends, group.size)
    counts = tuple(end - start for start, end in pairwise(cuts))
    start, end = cuts[group.rank], cuts[group.rank + 1]
    if start == end:
        start, end = min(pairwise(ends), key=lambda pair: pair[1] - pair[0])
    return (
        Share(counts, group),
        hidden_states[start:end],
        *(_between(boundary, start, end) for boundary in boundaries),
        *tree_map(lambda table: table[start:end], tables),
    )


def gather(share: Share | None, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return all rows of what leaves the layers of a tower; the same object if it is not split.

    Args:
        share: what `shard` returned.
        hidden_states: ``[rows of this process, width]``.
    """
    if share is None:
        return hidden_states
    return gathered_rows(hidden_states, share.counts, share.group)


def replaced_layer(module: nn.Module) -> str:
    """Return the name of a part of a tower's layers whose forward is not upstream's; empty if there is none.

    Nobody has proven that it keeps images apart. Modules and wrappers of torch, PEFT and accelerate do.
    """
    known = (*_KNOWN, inspect.unwrap(type(module).forward).__module__.partition(".")[0])
    for part in module.children():
        if isinstance(part, nn.ModuleList):
            for name, submodule in part.named_modules():
                if any(home.partition(".")[0] not in known for home in _homes(submodule)):
                    return f"{type(submodule).__name__} ({name})"
    return ""


def _group(module: nn.Module) -> SequenceGroup | None:
    """Return the group of this process; None if it does not exist yet, and cannot be created now.

    All processes of the world must create it at the same place. Where a tower is trained, all of them call
    it (`veomni_hook.multimodal.absent`); a frozen one runs as a whole until the text model has created the
    group.
    """
    if any(parameter.requires_grad for parameter in module.parameters()):
        return sequence_group()
    return made_group()


def _homes(module: nn.Module) -> Iterator[str]:
    """The modules that define what a call of ``module`` runs."""
    for forward in (type(module).forward, module.__dict__.get("forward")):
        function = (
            inspect.unwrap(forward.func if isinstance(forward, partial) else forward) if forward else None
        )
        if function is not None:
            yield getattr(function, "__module__", None) or ""


def _ends(rows: int, boundaries: Sequence[torch.Tensor]) -> list[int]:
    """Return where all of the boundaries allow a cut, in order; empty if one is not what it should be.

    The host waits for values that it does not know.
    """
    if not all(isinstance(boundary, torch.Tensor) and boundary.dim() == 1 for boundary in boundaries):
        return []
    host_copies(*boundaries)
    common: set[int] | None = None
    for boundary in boundaries:
        values = host_copy(boundary).tolist()
        if not values or values[0] != 0 or values[-1] != rows or values != sorted(values):
            return []
        common = {*values} if common is None else common & {*values}
    return sorted(common or ())


def _cuts(ends: Sequence[int], parts: int) -> list[int]:
    """Return ``parts + 1`` of the ends, with repetitions: the largest share is as small as it can be."""
    low, high = -(-ends[-1] // parts), ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _filled(ends, middle, parts)[-1] == ends[-1]:
            high = middle
        else:
            low = middle + 1
    return _filled(ends, high, parts)


def _filled(ends: Sequence[int], most: int, parts: int) -> list[int]:
    """Return the cuts of shares of at most ``most`` rows, each as large as possible."""
    cuts = [0]
    for _ in range(parts):
        cuts.append(ends[bisect_right(ends, cuts[-1] + most) - 1])
    return cuts


def _between(boundaries: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return the boundaries within a share, counted from its first row."""
    copy = host_copy(boundaries)
    own = copy[(copy >= start) & (copy <= end)] - start
    return note_copy(own.to(boundaries.device, non_blocking=True), own)

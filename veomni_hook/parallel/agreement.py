"""Whether the processes of a sequence group have the same batch: compared at every call in training.

With different batches, attention would mix positions of several sequences, and nothing else would tell.

The tensors of the outermost model's call are compared, by the names of its arguments: their shapes, and
digests of all that was not computed with gradients. Each process sends three numbers over the host. A digest
of a tensor on a device is read with the next call, so nobody waits for the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, NoReturn
from weakref import WeakSet
from zlib import crc32

import torch
from torch import distributed, nn
from torch.compiler import is_dynamo_compiling

from veomni_hook.errors import ParallelError
from veomni_hook.kernels.shared.host_values import known_copy
from veomni_hook.parallel import process
from veomni_hook.parallel.groups import SequenceGroup, made_group

__all__ = ["check_same_batch", "entered", "left"]

#: How many positions of hidden states are compared, spread over the batch.
_SAMPLES = 16
_TOLERANCE = 1e-2
#: Of larger tensors, digests read every second number, or every third, and so on.
_LARGEST = 1 << 22
#: Integers by their bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass
class _Call:
    """The call of a model that is in no other one."""

    name: str
    tensors: dict[str, torch.Tensor]
    comparison: _Comparison | None = None


@dataclass
class _Comparison:
    """What the processes of a group send each other for a call, on its way."""

    group: SequenceGroup
    #: Names of calls, and what is compared of them.
    own: Sequence[tuple[str, Mapping[str, object]]]
    numbers: list[torch.Tensor]
    arrived: Any
    #: Whether some of the call was not computed.
    has_data: bool
    over: bool = False


_CALL: ContextVar[_Call | None] = ContextVar("veomni_call", default=None)
#: Those that were split: the comparison starts as soon as they are called.
_SPLIT: WeakSet[nn.Module] = WeakSet()
_numbers = count(1)
#: What returns the digests of the last call that are late, the call's name, and the group.
_late: tuple[object, str, Callable[[], dict[str, int]]] | None = None


def entered(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Token[_Call | None] | None:
    """Note a call of ``model`` whose sequences may be shared, unless it is in another one; `left` ends it.

    A model that was split starts to compare: inside of another one, whose hooks are over, so that what FSDP2
    sends comes first.
    """
    if is_dynamo_compiling() or process.sizes().sp == 1 or not torch.is_grad_enabled():
        return None
    call, group = _CALL.get(), made_group() if model in _SPLIT else None
    if call is not None:
        if group is not None and call.comparison is None:
            call.comparison = _started(call, group)
        return None
    arguments = dict(kwargs)
    if args:
        arguments |= inspect.signature(model.forward).bind_partial(*args).arguments
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    call = _Call(type(model).__name__, tensors)
    if group is not None:
        call.comparison = _started(call, group)
    return _CALL.set(call)


def left(token: Token[_Call | None] | None) -> None:
    """Note that the call is over for which `entered` returned ``token``."""
    if token is not None:
        _CALL.reset(token)


def check_same_batch(
    model: nn.Module, hidden_states: torch.Tensor, group: SequenceGroup, *, first: bool
) -> None:
    """Compare the batch of the call that runs, once, before its processes exchange anything.

    ``model`` is split.

    Where all was computed, hidden states are compared at a few places, if the batch is the ``first``: the
    host waits for them. Zeros are not compared: dropout puts them at other places in each process.

    Raises:
        ParallelError: batches differ: of this call, or of the one before if they are on a device.
    """
    call = _CALL.get() or _Call(type(model).__name__, {"hidden states": hidden_states})
    comparison = call.comparison = call.comparison or _started(call, group)
    if comparison.over:
        return
    comparison.over = True
    _SPLIT.add(model)
    comparison.arrived.wait()
    if any(bool((numbers != comparison.numbers[0]).any()) for numbers in comparison.numbers):
        _differ(comparison)
    if first and not comparison.has_data:
        _check_values(comparison.own[0][0], hidden_states, group)


@torch.no_grad()
def _started(call: _Call, group: SequenceGroup) -> _Comparison:
    """Send the numbers of a call to the other processes of its group, which do so, too."""
    global _late  # noqa: PLW0603
    name = f"call {next(_numbers)} of {call.name} in training"
    shapes = {key: f"{tensor.dtype} {list(tensor.shape)}" for key, tensor in call.tensors.items()}
    before = _late
    known, late = _digests(call.tensors)
    _late = None if late is None else (group.host, name, late)
    own: list[tuple[str, Mapping[str, object]]] = [(name, shapes), (name, known), ("", {})]
    if before is not None and before[0] is group.host:
        own[2] = before[1], before[2]()
    mine = torch.tensor([crc32(repr(sorted(fields.items())).encode()) for _, fields in own])
    numbers = [torch.empty_like(mine) for _ in range(group.size)]
    arrived = distributed.all_gather(numbers, mine, group.host, async_op=True)
    return _Comparison(group, own, numbers, arrived, bool(known or late))


def _digests(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, int], Callable[[], dict[str, int]] | None]:
    """Return digests of what was not computed with gradients, by name: those of data that the host knows.

    And what waits for those of data on a device; None: there is no such data.
    """
    known, late = dict[str, int](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            continue
        copy = known_copy(tensor)
        if copy is not None:
            known[name] = int(_digest(copy))
        else:
            late[name] = _digest(tensor)
    if not late:
        return known, None
    on_device, names = torch.stack([*late.values()]), [*late]
    numbers = torch.empty(len(names), dtype=torch.int64, pin_memory=True).copy_(on_device, non_blocking=True)
    arrived = torch.get_device_module(on_device.device).Event()
    arrived.record()

    def wait() -> dict[str, int]:
        arrived.synchronize()
        return dict(zip(names, numbers.tolist(), strict=True))

    return known, wait


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number for values and their places, modulo 2^64."""
    bits = tensor.flatten()
    if (step := 1 + bits.shape[0] // _LARGEST) > 1:
        bits = bits[::step].contiguous()
    if bits.is_floating_point() or bits.is_complex():
        bits = bits.view(_BITS[bits.element_size()])
    length = bits.shape[0]
    return (bits * _factors(1 << length.bit_length(), bits.device)[:length]).sum()


@cache
def _factors(length: int, device: torch.device) -> torch.Tensor:
    """Return random integers, the same in all processes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (length,), generator=generator).to(device)


def _check_values(call: str, hidden_states: torch.Tensor, group: SequenceGroup) -> None:
    rows = hidden_states.flatten(2).flatten(0, 1)
    at = torch.linspace(0, rows.shape[0] - 1, _SAMPLES, device=rows.device).long()
    own = rows[at].detach().float().flatten().cpu()
    every = [torch.empty_like(own) for _ in range(group.size)]
    distributed.all_gather(every, own, group.host)
    samples = torch.stack(every)
    first = samples[:1]
    far = (samples - first).abs() > _TOLERANCE * first.abs().max().clamp(min=1e-30)
    if bool((far & (samples != 0) & (first != 0)).any()):
        _raise(group, call, "hidden states of other tokens")


def _differ(comparison: _Comparison) -> NoReturn:
    """Raise an error that names the first field that differs. All processes of the group call this."""
    own, group = comparison.own, comparison.group
    rows: list[Any] = [None] * group.size
    distributed.all_gather_object(rows, (distributed.get_rank(), own), group.host)
    for place, (call, fields) in enumerate(own):
        names = {name for _, row in rows for name in row[place][1]}
        for name in (*fields, *sorted(names - set(fields))):
            values = {rank: row[place][1].get(name, "no such tensor") for rank, row in rows}
            if len(set(values.values())) > 1:
                what = f"other values of `{name}`"
                if place == 0:
                    what = f"other shapes of `{name}`: " + ", ".join(
                        f"{value} in rank {rank}" for rank, value in values.items()
                    )
                _raise(group, call, what)
    raise AssertionError("numbers differ, but nothing that they were made of")  # pragma: no cover


def _raise(group: SequenceGroup, call: str, what: str) -> NoReturn:
    raise ParallelError(
        f"the {group.size} processes that share each sequence have {what}",
        where=f"{call}, rank {distributed.get_rank()}",
        fix="give them the same batches: index, count = veomni_hook.parallel.data_shard(), and "
        "DistributedSampler(dataset, num_replicas=count, rank=index); loaders that Trainer and accelerate "
        "prepare do so. What a process makes itself, as samples, has to be sent from the first of them",
    )

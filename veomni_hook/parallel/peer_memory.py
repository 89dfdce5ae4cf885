"""Exchanges inside a host through peer memory: each process writes into the memory of its peers' GPUs.

An all-to-all of NCCL reads and writes contiguous blocks, so heads are put in order before it. Here a kernel
writes blocks from where they are to the peers, and, after a barrier on the device, another one takes what
came to where it belongs. What does not fit goes in several rounds.

The memory has two halves, used by turns: a process writes for round n + 2 behind the barrier of round n + 1,
which its peers reach when they have read what came with round n.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from veomni_hook.accelerator import is_rocm
from veomni_hook.kernels.shared.operators import on_its_device
from veomni_hook.parallel.groups import SequenceGroup

__all__ = ["Mailbox", "mailbox", "notes", "reachable"]

Tensor = torch.Tensor

#: The bytes of a half: at first, and at most. More rounds take longer: on two H200s, steps with exchanges of
#: 400 MB took as long as with NCCL's if a half had 64 MiB, and 0.8 % less if it had 256.
_SMALLEST, _LARGEST = 32 << 20, 256 << 20
#: What a process writes begins at multiples of it, in bytes.
_ALIGNED = 256
#: Elements of a program, and bytes of a row at most.
_BLOCK, _LONGEST = 2048, 1 << 16

#: For each process group, its memory, which must not keep the group alive, or why it has none.
_MADE: WeakKeyDictionary[distributed.ProcessGroup, Mailbox | str] = WeakKeyDictionary()


class Mailbox:
    """Memory of this process that its peers write to; made by all processes of a group together.

    Attributes:
        half: the bytes that come in one round.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, half: int) -> None:
        from veomni_hook.parallel import peer_device  # imports triton, which may be missing

        self.half = half
        self._kernels: Any = peer_device
        self._rank, self._size = group.rank(), group.size()
        self._turn = 0
        # The handle does not keep the memory alive.
        self._memory, self._handle = symmetric(group, 2 * half, device)
        self._memories = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        self._timeout = 0 if timeout is None else int(1e3 * timeout.total_seconds())
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def exchange(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy block ``r`` of each of ``sources`` to process ``r``, into its ``targets`` at our place.

        Both are ``[size, batch, positions, heads, width]`` in any strides; numbers of a row are neighbours.
        Shapes and dtypes are those of the other processes.
        """
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._memory.device)
            if stream != self._stream:  # go on behind the last exchange
                stream.wait_stream(self._stream)
                self._stream = stream
        whole, slack = bytes_of(sources)
        rounds = max(1, -(-whole // (self.half - slack)))
        for number in range(rounds):
            self._turn = 1 - self._turn
            start, letters = self._turn * self.half, []
            for x, y in zip(sources, targets, strict=True):
                count = x[0].numel() // x.shape[-1]
                first, end = count * number // rounds, count * (number + 1) // rounds
                room = -(-(end - first) * x.shape[-1] * x.itemsize // _ALIGNED) * _ALIGNED
                numbers = self._rank, first, end, *x.shape[2:4], start // x.itemsize, room // x.itemsize
                letters.append((x, y, numbers))
                start += (self._size - 1) * room
            for x, y, numbers in letters:
                _run(x, y, self._memories, numbers=numbers, size=self._size, function=self._kernels.write)
            self._handle.barrier(0, self._timeout)
            for _, y, numbers in letters:
                _run(y, self._memories, numbers=numbers, size=self._size, function=self._kernels.read)

    def finish(self, group: distributed.ProcessGroup) -> None:
        """Wait, in all processes of its group, until nobody writes any more."""
        if self._stream is not None:
            self._stream.synchronize()
        distributed.barrier(group)


def bytes_of(sources: Sequence[Tensor]) -> tuple[int, int]:
    """Return how much comes in an exchange, and how much more it may take: a row, and room to begin anew."""
    blocks = [x[1:] for x in sources]  # what stays here needs no room
    whole = sum(x.numel() * x.itemsize for x in blocks)
    return whole, sum(x.shape[0] * (x.shape[-1] * x.itemsize + _ALIGNED) for x in blocks)


@on_its_device
def _run(*tensors: Tensor, numbers: Sequence[int], size: int, function: Any) -> None:
    """Launch ``write`` with what is sent, what comes and the memories, or ``read`` without the first."""
    first, moved = tensors[0], tensors[:-1]
    arguments = *numbers, *(stride for x in moved for stride in x.stride()[:4])
    # Numbers that need 64 bits need other code.
    wide = [number >= 1 << 31 for number in arguments]
    launch, rows = _launch(function, len(tensors), first.device, first.dtype, first.shape[-1], size, *wide)
    blocks = size if len(moved) == 2 else size - 1
    launch((blocks, -(-(numbers[2] - numbers[1]) // rows), 1), *tensors, *arguments)


@lru_cache(maxsize=256)
def _launch(
    function: Any,
    tensors: int,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    size: int,
    *in_64_bits: bool,
) -> tuple[Any, int]:
    """Return how to launch a function, and the rows of a program."""
    from veomni_hook.kernels.shared.launch import Launch, power

    rows = max(1, _BLOCK // power(width))
    return Launch(function, tensors, size, width, power(width), rows), rows


def symmetric(group: distributed.ProcessGroup, size: int, device: torch.device) -> tuple[Tensor, Any]:
    """Return ``size`` bytes of this process, and torch's handle of those of all processes of a group."""
    from torch._C._distributed_c10d import _SymmetricMemory

    memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, group.group_name)
    return memory, _SymmetricMemory.rendezvous(memory)


def mailbox(group: SequenceGroup, sources: Sequence[Tensor]) -> Mailbox | None:
    """Return the memory through which a group exchanges ``sources`` of `Mailbox.exchange`, or None.

    Their device is `reachable`. All processes of the group must ask. The first time, and where a larger half
    saves rounds, they make the memory together, and the host waits.
    """
    device = sources[0].device
    if any(x.stride(-1) != 1 or x.shape[-1] * x.itemsize > _LONGEST for x in sources):
        return None
    processes = distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type, attr-defined]
    made = _MADE.get(processes)
    if isinstance(made, str):
        return None
    if made is None or made.half < _LARGEST:
        half = min(_LARGEST, max(_SMALLEST, 1 << (sum(bytes_of(sources)) - 1).bit_length()))
        if made is None or made.half < half:
            made = _MADE[processes] = _made(processes, device, half, made)
    return None if isinstance(made, str) else made


def notes() -> list[str]:
    """Return how the groups of this process exchange; nothing before the first exchange."""
    return [
        f"exchanges inside the host are collectives: {made}"
        if isinstance(made, str)
        else f"exchanges inside the host go through peer memory, {2 * made.half >> 20} MiB of this GPU"
        for made in _MADE.values()
    ]


def reachable(device: torch.device) -> bool:
    """Return whether memory of a device may be written by peers, in what runs now."""
    if torch.compiler.is_compiling() or device.type != "cuda" or is_rocm():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _made(
    group: distributed.ProcessGroup, device: torch.device, half: int, before: Mailbox | None
) -> Mailbox | str:
    if reason := refuses(group):
        return reason
    if before is not None:
        before.finish(group)
    made: Mailbox | str
    try:
        made = Mailbox(group, device, half)
    except (RuntimeError, ImportError, AttributeError) as error:  # torch calls this interface private
        made = f"torch cannot share memory between processes: {error}"
    everywhere = torch.tensor([isinstance(made, Mailbox)], dtype=torch.int32, device=device)
    distributed.all_reduce(everywhere, distributed.ReduceOp.MIN, group)
    if not everywhere.item() and isinstance(made, Mailbox):
        return "another process of the group cannot share memory"
    return made


def refuses(group: distributed.ProcessGroup) -> str | None:
    """Return why the processes of a group do not share memory, or None; all of them say the same."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE is set"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    hosts = {rank // local for rank in distributed.get_process_group_ranks(group)} if local else set()
    return None if len(hosts) == 1 else "not all processes are known to be on one host"

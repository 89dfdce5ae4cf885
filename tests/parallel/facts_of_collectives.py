"""How far each collective's output and gradients are from one process's, and what groups say.

Every process has the whole input; a collective's input is its part, and the gradient of the whole input is
summed over the group, as the averages of parameters would be.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from tests.parallel.small import refusal
from veomni_hook.parallel import collectives, data_shard, groups, peer_memory, process
from veomni_hook.parallel.collectives import all_averaged, gathered, own_part, to_heads, to_positions

FACTS: dict[str, object] = {}
GROUP: Any = None


def whole(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    return float((a - b).abs().max()) if a.numel() else 0.0


def summed(grad: torch.Tensor) -> torch.Tensor:
    """The sum over the sequence group, which other groups repeat."""
    total = grad.clone()
    distributed.all_reduce(total)
    return total * GROUP.size / distributed.get_world_size()


def check_slice_and_gather(length: int) -> None:
    x, weight = whole(2, length, 3), whole(2, length, 3).detach()
    part = own_part(x * 2, 1, GROUP)
    assert part.shape[1] == max(-(-length // GROUP.size), min(length, 2))  # layers ask for more than one
    got = gathered(part.sin(), 1, length, GROUP)
    assert got._base is None and got.is_contiguous()  # as a layer returns it: it may be changed in place
    (got * weight).sum().backward()
    expected = (x.detach().clone().requires_grad_() * 2).sin()
    FACTS[f"gather {length}"] = difference(got.detach(), expected.detach())
    y = x.detach().clone().requires_grad_()
    ((y * 2).sin() * weight).sum().backward()
    # Average over the processes: the sum of the gradients, each `size` times too large, divided by `size`.
    FACTS[f"gather's gradient {length}"] = difference(summed(x.grad) / GROUP.size, y.grad)


def check_unaligned() -> None:
    """Elements that do not lie in groups of 8 bytes as the result's do."""
    length = 3 * GROUP.size
    x = torch.arange(16 * length, dtype=torch.bfloat16).view(2, length, 8)[..., 1:5]
    part = x[:, 3 * GROUP.rank : 3 * GROUP.rank + 3]
    FACTS["gather unaligned"] = difference(gathered(part, 1, length, GROUP), x)


def check_heads(
    widths: tuple[int, int, int], heads: tuple[int, int], dtypes: tuple[torch.dtype, ...]
) -> None:
    name = f"{widths} {heads} {len(set(dtypes))}"
    length, size, rank = 3 * GROUP.size, GROUP.size, GROUP.rank
    counts = (heads[0], heads[1], heads[1])
    xs = [whole(2, n, length, w, dtype=d) for n, w, d in zip(counts, widths, dtypes, strict=True)]
    mine = slice(rank * 3, rank * 3 + 3)
    got = to_heads([x[:, :, mine] for x in xs], GROUP)
    share = [x[:, rank * n // size : (rank + 1) * n // size] for x, n in zip(xs, counts, strict=True)]
    FACTS[f"to heads {name}"] = max(
        difference(g.detach(), s.detach()) for g, s in zip(got, share, strict=True)
    )
    back = to_positions(got[0].sin().transpose(1, 2), GROUP)
    expected = xs[0].sin().transpose(1, 2)[:, mine]
    FACTS[f"to positions {name}"] = difference(back.detach(), expected.detach())
    loss = (back.double() ** 3).sum() + sum((g.double() ** 2).sum() for g in got[1:])
    loss.backward()
    ys = [x.detach().clone().requires_grad_() for x in xs]
    ((ys[0].sin().double() ** 3).sum() + sum((y.double() ** 2).sum() for y in ys[1:])).backward()
    FACTS[f"gradient {name}"] = max(difference(summed(x.grad), y.grad) for x, y in zip(xs, ys, strict=True))


def check_average() -> None:
    x = whole(4)
    part = (x * (GROUP.rank + 1)).sum()
    average = all_averaged(part, GROUP)
    (average**2).backward()
    y = x.detach().clone().requires_grad_()
    factor = sum(range(1, GROUP.size + 1)) / GROUP.size
    ((y.sum() * factor) ** 2).backward()
    FACTS["average"] = difference(average.detach(), (y.detach().sum() * factor))
    FACTS["average's gradient"] = difference(summed(x.grad) / GROUP.size, y.grad)


def check_traced() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        part = own_part(x, 1, GROUP)
        q = part[:, None].expand(-1, GROUP.size, -1, -1)
        output = to_positions(to_heads((q * 1, q * 2, q * 3), GROUP)[0].sin().transpose(1, 2), GROUP)
        return gathered(output, 1, x.shape[1], GROUP)

    x = whole(2, 3 * GROUP.size, 4)
    y = x.detach().clone().requires_grad_()
    expected = step(x)
    expected.sum().backward()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(y)
    got.sum().backward()
    FACTS["traced"] = max(difference(expected.detach(), got.detach()), difference(x.grad, y.grad))


class SharedFiles:
    """What torch's handle of peers' memory does, by files; the devices' barrier is the hosts'."""

    def __init__(self, group: Any, size: int, device: torch.device) -> None:
        folder = [tempfile.mkdtemp()]
        distributed.broadcast_object_list(folder, group_src=0, group=group)
        self.group, self.rounds = group, -1
        self.parts = [
            torch.from_file(f"{folder[0]}/{rank}", shared=True, size=size, dtype=torch.uint8)
            for rank in range(group.size())
        ]
        self.buffer_ptrs = [part.data_ptr() for part in self.parts]
        self.parts[group.rank()].fill_(255)
        self.barrier(0, 0)

    def barrier(self, channel: int, timeout: int) -> None:
        self.rounds += 1
        distributed.barrier(self.group)


def check_peers() -> None:
    """The exchanges again, through memory that processes share; more than once, so that halves are reused."""
    n, double, single = GROUP.size, torch.float64, torch.float32
    expected = {name: FACTS.pop(name) for name in [*FACTS] if name.startswith(("to ", "gradient ", "gather"))}
    made = []

    def shared(*operands: Any) -> Any:
        made.append(SharedFiles(*operands))
        return made[-1].parts[GROUP.rank], made[-1]

    with (
        patch.object(collectives, "reachable", lambda _: True),
        patch.multiple(peer_memory, symmetric=shared, refuses=lambda *_: None, _SMALLEST=2048, _LARGEST=8192),
    ):
        for _ in range(2):
            check_slice_and_gather(n * 3)
            check_slice_and_gather(n * 3 - 1)
            check_unaligned()
            check_heads((4, 4, 4), (2 * n, n), (double, double, double))
            check_heads((4, 4, 4), (3 * n, 3 * n), (double, double, double))
            check_heads((6, 6, 4), (n, n), (double, double, double))
            check_heads((4, 1, 3), (2 * n, n), (double, single, double))
    FACTS["sizes"] = [files.parts[0].numel() for files in made]
    FACTS["said"] = peer_memory.notes()
    FACTS["rounds"] = sum(files.rounds for files in made)
    FACTS.update({f"{name} through peers": FACTS.pop(name) for name in expected if name in FACTS})
    FACTS.update(expected)


def check_refusals() -> None:
    """Processes that cannot share memory use collectives, all of them; nobody is asked twice."""
    asked = []

    def symmetric(*_: object) -> None:
        asked.append(None)
        if GROUP.rank == 0:
            raise RuntimeError("no pidfd_getfd here")

    with patch.object(peer_memory, "refuses", lambda *_: None):
        peer_memory._MADE.clear()
        with (
            patch.object(peer_memory, "symmetric", symmetric),
            patch.object(peer_memory.Mailbox, "__init__", symmetric),
        ):
            x = torch.zeros(1, 2, GROUP.size, 4)
            FACTS["refused"] = [peer_memory.mailbox(GROUP, [x]) for _ in range(2)]
    FACTS["asked"] = len(asked)
    (reason,) = peer_memory._MADE.values()
    FACTS["reason"] = reason
    FACTS["said of the reason"] = peer_memory.notes()
    peer_memory._MADE.clear()
    processes = distributed_c10d._resolve_process_group(GROUP.name)
    for name, value in (("LOCAL_WORLD_SIZE", "1"), ("NCCL_P2P_DISABLE", "1")):
        with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "64", name: value}):
            FACTS[name] = peer_memory.refuses(processes)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="64"):
        FACTS["one host"] = peer_memory.refuses(processes)


def facts(join: Callable[[], None], sizes: str) -> dict[str, object]:
    """Return all of them; ``join`` joins the group of processes."""
    global GROUP
    FACTS["not initialised"] = refusal(groups.sequence_group)
    FACTS["data before"] = data_shard()
    join()
    process.tell("sp=3")
    FACTS["not divided"] = refusal(groups.sequence_group)
    FACTS["data not divided"] = refusal(data_shard)
    process.tell(sizes)
    GROUP = groups.sequence_group()
    assert groups.sequence_group() is GROUP
    assert GROUP.name != distributed.group.WORLD.group_name  # FSDP's collectives are on the world's
    FACTS["group"] = [GROUP.rank, GROUP.size, distributed.get_process_group_ranks(GROUP.mesh.get_group("sp"))]
    FACTS["data"] = data_shard()
    n = GROUP.size
    for length in (1, n, n * 3, n * 3 - 1, n * 2 + 1):
        check_slice_and_gather(length)
    check_unaligned()
    double, single = torch.float64, torch.float32
    check_heads((4, 4, 4), (2 * n, n), (double, double, double))
    check_heads((4, 4, 4), (3 * n, 3 * n), (double, double, double))
    check_heads((6, 6, 4), (n, n), (double, double, double))
    check_heads((4, 1, 3), (2 * n, n), (double, single, double))
    check_peers()
    check_refusals()
    check_average()
    if distributed.get_world_size() == 2:
        check_traced()
    return FACTS

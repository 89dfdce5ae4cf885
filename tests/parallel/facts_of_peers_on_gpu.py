"""One of two processes, each with a GPU: exchanges and gathers through peer memory, against NCCL's.

torchrun --standalone --nproc_per_node 2 -m tests.parallel.facts_of_peers_on_gpu
"""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import distributed

from veomni_hook.parallel import collectives, groups, peer_memory, process

#: Batch, positions of a process, heads of queries and of keys, width, dtype; the first half is made for the first.
CASES = (
    (1, 5, 4, 2, 64, torch.bfloat16),
    (2, 128, 8, 4, 128, torch.bfloat16),
    (1, 7, 4, 2, 33, torch.float16),
    (3, 64, 6, 2, 80, torch.float32),
    (2, 16, 4, 4, 1, torch.bfloat16),
    (1, 30_000, 32, 8, 128, torch.bfloat16),
    (2, 12, 4, 4, 64, torch.float64),
)


def exchanged(tensors: list[torch.Tensor], group: groups.SequenceGroup) -> list[torch.Tensor]:
    """What comes of each kind of exchange, and the gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    heads = collectives.to_heads(leaves, group)
    back = collectives.to_positions((heads[0] * 2).transpose(1, 2), group)
    hidden = collectives.gathered(back.flatten(2), 1, group.size * back.shape[1] - 1, group)
    (hidden.float().square().sum() + sum(x.float().square().sum() for x in heads[1:])).backward()
    return [x.detach() for x in (*heads, back, hidden)] + [x.grad for x in leaves if x.grad is not None]


def in_memory(x: torch.Tensor) -> list[int]:
    """The strides that say where numbers are."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def check(case: Callable[[], list[torch.Tensor]], what: object) -> None:
    """The same bits twice through peer memory, and by collectives."""
    peers = [case() for _ in range(2)]
    with patch.object(collectives, "mailbox", lambda *_: None):
        expected = case()
    for got in peers:
        for number, (x, y) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(x, y), (what, number)
            assert in_memory(x) == in_memory(y), (what, number, x.shape, x.stride(), y.stride())


def main() -> None:
    """Be one of the processes."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl")
    process.tell("sp=2")
    group = groups.sequence_group()
    generator = torch.Generator("cuda").manual_seed(group.rank)
    halves = []
    for batch, part, heads, key_heads, width, dtype in CASES:
        made = [
            torch.randn(batch, part, number, width, device="cuda", generator=generator).to(dtype)
            for number in (heads, key_heads, key_heads)
        ]
        contiguous = [x.transpose(1, 2) for x in made]
        check(lambda contiguous=contiguous: exchanged(contiguous, group), (batch, part, width, dtype))
        # In another order of memory, and a part of a larger tensor.
        apart = [x.transpose(1, 2).contiguous() for x in made]
        parts = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in contiguous]
        check(lambda apart=apart: exchanged(apart, group), "heads first")
        check(lambda parts=parts: exchanged(parts, group), "parts")
        (mailbox,) = peer_memory._MADE.values()
        assert isinstance(mailbox, peer_memory.Mailbox), mailbox
        halves.append(mailbox.half)
    assert halves[0] == peer_memory._SMALLEST and halves[-1] == peer_memory._LARGEST, halves
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def aside() -> list[torch.Tensor]:
        with torch.cuda.stream(stream):
            found = exchanged(contiguous, group)
        torch.cuda.current_stream().wait_stream(stream)
        return found

    check(aside, "another stream")
    print(f"rank {group.rank}: the same", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Random numbers that differ by process: dropout in attention, where each process has other heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["own_random_numbers"]

_LARGEST = 2**62


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
        seed = int(torch.randint(_LARGEST, ()))  # also: the next call starts elsewhere
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed((seed + offset) % _LARGEST)
            yield
        return
    backend = torch.get_device_module(device)
    generator = backend.default_generators[backend.current_device() if device.index is None else device.index]
    # Neither makes the host wait.
    seed, position = generator.initial_seed(), generator.get_offset()
    torch.empty((), device=device).uniform_()
    after = generator.get_state()
    try:
        generator.manual_seed((seed * 1_000_003 + position * 8191 + offset) % _LARGEST)
        yield
    finally:
        generator.set_state(after)

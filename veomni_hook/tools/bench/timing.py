"""Times and memory of several sides by turns, on an accelerator or a CPU.

On an accelerator a time is that between two events; before each call the device is given something to do that
empties its caches, so that the host is ahead and no launch is timed. On a CPU it is the clock's.

Each timed call follows another of the same side. A GPU at its power limit lowers its clock with a delay, so a
side would be measured at the clock that the side before it left: on an H200, the loss of 8,192 x 2,048 x
151,936 took 20.8 ms after a slow kernel that waits for memory and 23.6 ms after large products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch

from veomni_hook import accelerator

__all__ = ["bandwidth", "by_turns", "call_time", "peak_bytes", "product", "recorded_peak"]

Call = Callable[[], object]

# How often 1 GiB is written, in a quarter of a millisecond at the bandwidth of an H200. With two, a slow host
# was not ahead of backward passes of about a millisecond: its own time was added, up to a fifth of theirs.
_AHEAD = 8


def by_turns(sides: Mapping[str, Call], device: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each side, by round."""
    for _ in range(3 if device in accelerator.TYPES else 1):
        for side in sides.values():
            side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    timed = _on_accelerator(device) if device in accelerator.TYPES else _on_cpu
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(timed(side))
    return times


def _on_accelerator(device: str) -> Callable[[Call], float]:
    busy = torch.empty(1 << 28, device=device, dtype=torch.float32)

    event: Callable[[], Any] = partial(accelerator.module(device).Event, enable_timing=True)

    def timed(side: Call) -> float:
        start, end = event(), event()
        side()
        for _ in range(_AHEAD):
            busy.zero_()
        start.record()
        side()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return timed


def _on_cpu(side: Call) -> float:
    began = time.perf_counter()
    side()
    return (time.perf_counter() - began) * 1e3


def call_time(side: Call, device: str, calls: int, *, waited: bool) -> float:
    """Return the milliseconds of one of many calls that follow each other, on an accelerator.

    If it is ``waited`` for, that is the longer of host and device; else what a call takes on the host.
    """
    there = accelerator.module(device)
    for _ in range(3):
        side()
    there.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        side()
    if waited:
        there.synchronize()
    taken = time.perf_counter() - began
    there.synchronize()
    return taken / calls * 1e3


def peak_bytes(side: Call, device: str) -> int:
    """Return the most bytes that torch's allocator held during a call on top of those before it."""
    with recorded_peak(device) as peak:
        side()
    return peak()


@contextmanager
def recorded_peak(device: str) -> Iterator[Callable[[], int]]:
    """Record what torch's allocator holds; after the block, the result returns what `peak_bytes` does."""
    if device in accelerator.TYPES:
        there = accelerator.module(device)
        there.synchronize()
        there.reset_peak_memory_stats()
        allocated = int(there.memory_allocated())
        peak = [0]
        yield lambda: peak[0]
        there.synchronize()
        peak[0] = int(there.max_memory_allocated()) - allocated
        return
    with torch.profiler.profile(profile_memory=True) as profile:

        def highest() -> int:
            recorded: Any = profile.profiler
            events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
            ordered = sorted(events, key=lambda event: event.start_ns())
            return max(accumulate((int(event.nbytes()) for event in ordered), initial=0))

        yield highest


@cache
def bandwidth(device: str) -> float:
    """Return bytes a second of a copy, what is read and what is written together."""
    source = torch.randn(1 << (29 if device in accelerator.TYPES else 25), device=device)
    target = torch.empty_like(source)
    (times,) = by_turns({"copy": lambda: target.copy_(source)}, device, 15).values()
    return 2 * source.nbytes / statistics.median(times) * 1e3


@cache
def product(device: str, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """Return a large product of matrices, and its floating-point operations.

    It takes part by turns with what is compared with it: a GPU at its power limit lowers its clock. On an
    H200 this product ran at 789 TFLOP/s before a benchmark, and at 662 between steps of large experts.
    """
    size = 8192 if device in accelerator.TYPES else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return partial(torch.mm, a, b), 2 * size**3

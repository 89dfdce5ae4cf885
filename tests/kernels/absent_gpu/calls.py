"""Calls of every op's Triton kernels, forward and backward: ``tests/kernels/<op>/gpu_calls.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

from tests.kernels.absent_gpu.operands import Call

__all__ = ["OPS", "first"]

#: By name: an op, or for experts, which have most to choose, a part of one.
OPS: dict[str, Callable[[], Iterator[Call]]] = {}
_PARTS = [
    import_module(f"tests.kernels.{path.parent.name}.gpu_calls").CALLS
    for path in sorted(Path(__file__).parents[1].glob("*/gpu_calls.py"))
]
for _parts in _PARTS:
    OPS |= _parts


def first() -> Iterator[Call]:
    """The first call of each op."""
    for parts in _PARTS:
        op, calls = next(iter(parts.items()))
        yield from ((f"{op}: {name}", call) for name, call in islice(calls(), 1))

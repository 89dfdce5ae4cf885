"""Calls of every op's Triton kernels, forward and backward: `calls` in ``tests/kernels/<op>/gpu_calls.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

from tests.kernels.absent_gpu.operands import Call

#: By name: an op, or for experts, which have most to choose, a part of one.
OPS: dict[str, Callable[[], Iterator[Call]]] = {}
_PARTS = []
for _path in sorted(Path(__file__).parents[1].glob("*/gpu_calls.py")):
    _module = import_module(f"tests.kernels.{_path.parent.name}.gpu_calls")
    _PARTS.append(_module.CALLS if hasattr(_module, "CALLS") else {_path.parent.name: _module.calls})
    OPS |= _PARTS[-1]


def first() -> Iterator[Call]:
    """The first call of each op."""
    for parts in _PARTS:
        op, calls = next(iter(parts.items()))
        yield from ((f"{op}: {name}", call) for name, call in islice(calls(), 1))

"""Calls of every op's Triton kernels, forward and backward: ``tests/kernels/<op>/gpu_calls.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from tests.kernels.absent_gpu.operands import Call

__all__ = ["OPS"]

#: By name: an op, or for experts, which have most to choose, a part of one.
OPS: dict[str, Callable[[], Iterator[Call]]] = {}
for path in sorted(Path(__file__).parents[1].glob("*/gpu_calls.py")):
    OPS |= import_module(f"tests.kernels.{path.parent.name}.gpu_calls").CALLS

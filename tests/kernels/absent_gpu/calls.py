"""Calls of every op's Triton kernels, forward and backward: at the sizes of its cases, or by its own `calls`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import islice, product
from pathlib import Path

from tests.kernels import contract, declared
from tests.kernels.absent_gpu.operands import Call, both_ways

#: By name: an op, or for experts, which have most to choose, a part of one.
OPS: dict[str, Callable[[], Iterator[Call]]] = {}


def of_cases(op: str) -> Iterator[Call]:
    """Each kernel of an op in the contract."""
    for variant, kernel in declared.kernels(op, "triton").items():
        case = contract.cases(op)[variant]
        for size, dtype in product(case.gpu, case.gpu_dtypes):
            call = contract.Call(kernel, size, dtype)
            yield f"{variant} {size} {dtype}", partial(both_ways, call.ours, call.tensors, call.wanted)


_PARTS: list[dict[str, Callable[[], Iterator[Call]]]] = []
for _op in contract.OPS:
    if any(each.gpu for each in contract.cases(_op).values()):
        _PARTS.append({_op: partial(of_cases, _op)})
for _path in sorted(Path(__file__).parents[1].glob("*/gpu_calls.py")):
    _module = import_module(f"tests.kernels.{_path.parent.name}.gpu_calls")
    _PARTS.append(_module.CALLS if hasattr(_module, "CALLS") else {_path.parent.name: _module.calls})
for _part in _PARTS:
    OPS |= _part


def first() -> Iterator[Call]:
    """The first call of each op."""
    for parts in _PARTS:
        op, calls = next(iter(parts.items()))
        yield from ((f"{op}: {name}", call) for name, call in islice(calls(), 1))

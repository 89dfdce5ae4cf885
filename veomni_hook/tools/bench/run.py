"""Measures problems: parts, sides, shares of the limit, memory, and the host's part apart."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.tools.bench.timing import bandwidth, by_turns, call_time, peak_bytes, product
from veomni_hook.tools.significance import Comparison, compare

__all__ = ["Row", "measured"]

# Six pairs are the fewest that tell a difference.
ROUNDS = {"cpu": 6, **dict.fromkeys(accelerator.TYPES, 20)}
_PRODUCTS = "products"
#: A forward that takes less is bound by the host: what it takes there is measured apart.
SHORT = 1.0


@dataclass(frozen=True)
class Row:
    """One part of one problem.

    Attributes:
        op, part, dtype, shape: what was measured; the part ``host`` is the host's time of a step, with the
            device not waited for, ``wall`` its time where many steps follow each other.
        limit, work: bytes or floating-point operations, and the fewest that are needed; the limit
            ``products`` is the time of the part's own matrix products.
        milliseconds: the median by side; what cannot do it is not there.
        share: of what the device can do at most, by side.
        peak: bytes above what was held before, by side.
        failed: in a row of its own, why a side could not compute the problem (the part ``failed``; if its
            forward can, that takes part), or why there is no side here (the part ``absent``, once an op).
        products: the median milliseconds of the problem's products, or of a large one, where the limit is
            not the bandwidth.
        against: every other side compared with ``eager``, if that takes part.
    """

    op: str
    part: str
    dtype: str
    shape: str
    limit: str
    work: int
    milliseconds: Mapping[str, float]
    share: Mapping[str, float]
    peak: Mapping[str, int]
    failed: Mapping[str, str] = field(default_factory=dict)
    products: float | None = None
    against: Mapping[str, Comparison] = field(default_factory=dict)


def able(problem: Problem) -> tuple[Problem, dict[str, Side], dict[str, str]]:
    """Return the problem with the sides that can compute it here, those that have a forward only, and why."""
    failed, forward = {}, {}
    for name, side in problem.sides.items():
        try:
            _step(problem, side)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            with suppress(Exception):  # the same reason
                _forward(problem, side)()
                forward[name] = side
    sides = {name: side for name, side in problem.sides.items() if name not in failed}
    return replace(problem, sides=sides), forward, failed


def measured(problems: Iterable[Problem], device: str) -> Iterator[Row]:
    """Yield a row for every part of every problem, as soon as it is measured."""
    # A graph of torch.compile gives its buffers away in the first of its backwards unless it is told not to.
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    told: Mapping[str, str] = {}
    for candidate in problems:
        torch._dynamo.reset()
        problem, forward_only, failed = able(candidate)
        if problem.absent != told:
            told = problem.absent
            yield _without("absent", problem, told)
        if failed:
            yield _without("failed", problem, failed)
        forward = 0.0
        for part in problem.work:
            sides = {**problem.sides, **(forward_only if part == "forward" else {})}
            calls = {name: _call(problem, name, side, part) for name, side in sides.items()}
            row = _row(problem, part, calls, device)
            if part == "forward":
                forward = min((row.milliseconds[name] for name in problem.sides), default=0.0)
            yield row
        if device in accelerator.TYPES and problem.incoming and forward < SHORT:
            steps = {name: partial(_step, problem, side) for name, side in problem.sides.items()}
            for part, count, waited in (("host", 200, False), ("wall", 100, True)):
                taken = {name: call_time(step, device, count, waited=waited) for name, step in steps.items()}
                yield Row(problem.op, part, problem.dtype, problem.shape, "", 0, taken, {}, {})


def _without(part: str, problem: Problem, reasons: Mapping[str, str]) -> Row:
    return Row(problem.op, part, problem.dtype, problem.shape, "", 0, {}, {}, {}, reasons)


def _row(problem: Problem, part: str, calls: Mapping[str, Callable[[], object]], device: str) -> Row:
    work, products = problem.work[part], None
    if (floor := _floor(problem, work, device)) is None:
        turns = by_turns(calls, device, ROUNDS[device])
        times = {name: statistics.median(taken) for name, taken in turns.items()}
        share = {name: work / taken / bandwidth(device) * 1e3 for name, taken in times.items()}
    else:
        multiply, portions = floor
        turns = by_turns({_PRODUCTS: multiply, **calls}, device, ROUNDS[device])
        times = {name: statistics.median(taken) for name, taken in turns.items()}
        products = times.pop(_PRODUCTS)
        share = {name: portions * products / taken for name, taken in times.items()}
    peak = {}
    for name, call in calls.items() if part == "step" else ():
        for leaf in problem.leaves:  # their gradients are made in the step
            leaf.grad = None
        peak[name] = peak_bytes(call, device)
    against = {
        name: compare([turns[EAGER]], [turns[name]]) for name in times if name != EAGER and EAGER in times
    }
    return Row(
        problem.op, part, problem.dtype, problem.shape, problem.limit, work, times, share, peak,
        products=products, against=against,
    )  # fmt: skip


def _floor(problem: Problem, work: int, device: str) -> tuple[Callable[[], object], float] | None:
    """Return products that take part by turns, and how often their work is in ``work``; None for bytes."""
    if problem.products is not None:
        return partial(problem.products, *problem.leaves), work / problem.work["step"]
    if problem.limit == "bytes":
        return None
    large, operations = product(device, problem.leaves[0].dtype)
    return large, work / operations


def _call(problem: Problem, name: str, side: Side, part: str) -> Callable[[], object]:
    if part == "step":
        return partial(_step, problem, side)
    return _forward(problem, side) if part == "forward" else _backward(problem, name, side, part)


def _forward(problem: Problem, side: Side) -> Callable[[], object]:
    return partial(torch.no_grad()(side), *problem.leaves)


def _backward(problem: Problem, name: str, side: Side, part: str) -> Callable[[], object]:
    """The backward alone, from a graph that is kept."""
    leaves = [leaf.detach().requires_grad_() for leaf in problem.leaves]
    results = side(*leaves)
    incoming = problem.incoming[part]
    if name in problem.spoils:
        incoming = [gradient.clone() for gradient in incoming]
    return partial(torch.autograd.grad, results, leaves, incoming, retain_graph=True)


def _step(problem: Problem, side: Side) -> None:
    """Forward and backward; gradients of the operands start from nothing."""
    for leaf in problem.leaves:
        leaf.requires_grad_().grad = None
    results = side(*problem.leaves)
    results = results if isinstance(results, tuple) else (results,)
    incoming = next(iter(problem.incoming.values()), None)
    torch.autograd.backward(results, incoming)

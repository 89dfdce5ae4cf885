"""What is measured: ``kernels/<op>/bench.py``, and ``bench_<part>.py`` for other problems of an op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from veomni_hook import kernels
from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.registry import built_in

if TYPE_CHECKING:
    from veomni_hook.kernels.problem import Problem

__all__ = ["benchmarks", "checked", "problems"]


@cache
def benchmarks() -> dict[str, str]:
    """Return the module of each benchmark, by name: the op's, or ``<op>_<part>``; by alphabet."""
    modules = {}
    for op in built_in():
        for one in iter_modules([f"{folder}/{op}" for folder in kernels.__path__]):
            name, _, part = one.name.partition("_")
            if name == "bench":
                modules["_".join(filter(None, (op, part)))] = f"{kernels.__name__}.{op}.{one.name}"
    return modules


def checked(names: Sequence[str]) -> Sequence[str]:
    """Return ``names``; raise KernelError, with those that there are, for one that is not measured."""
    for name in names:
        if name not in benchmarks():
            raise KernelError(
                f"there is no benchmark {name!r}", where="bench", fix=f"ops: {', '.join(benchmarks())}"
            )
    return names


def problems(name: str, device: str, *, quick: bool = False) -> Iterable[Problem]:
    """Return the problems of a benchmark, each made when it is asked for; the first two where ``quick``."""
    of_benchmark: Iterable[Problem] = import_module(benchmarks()[name]).problems(device, quick=quick)
    return of_benchmark

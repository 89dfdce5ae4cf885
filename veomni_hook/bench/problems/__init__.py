"""Sizes and sides of every op that is measured: one file an op, with ``problems(device, quick)``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from veomni_hook.bench.problem import Problem

__all__ = ["OPS", "problems"]

OPS = ("rms_norm",)


def problems(op: str, device: str, *, quick: bool = False) -> Iterable[Problem]:
    """Return the problems of ``op``, each made when it is asked for; the first two where ``quick``."""
    found: Iterable[Problem] = import_module(f"{__name__}.{op}").problems(device, quick=quick)
    return found

"""The kernels and references that the tables of variants declare, loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veomni_hook.kernels.selection.declaration import Kernel
from veomni_hook.kernels.selection.registry import load_attribute, registry


def kernels(op: str, backend: str) -> dict[str, Kernel]:
    """The declared kernels of a backend, by variant."""
    return {each.variant: each for each in registry.kernels(op) if each.backend == backend}


def kernel(op: str, variant: str, backend: str) -> Callable[..., Any]:
    """The code of a backend's kernel for a variant."""
    return load_attribute(kernels(op, backend)[variant].load)


def refusal(op: str, variant: str, backend: str) -> Callable[..., str | None]:
    """What says why a backend's kernel cannot take a call of a variant: its rules, as slots ask them."""
    rules = [*map(load_attribute, registry.rules(kernels(op, backend)[variant]))]

    def refuses(owner: Any, *operands: Any) -> str | None:
        for rule in rules:
            if (reason := rule(owner, *operands)) is not None:
                return reason
        return None

    return refuses


def reference(op: str, variant: str) -> Callable[..., Any]:
    """The formula of a variant."""
    return load_attribute(registry.ops()[op].variants[variant].reference)


def pair(op: str, variant: str, backend: str) -> list[Callable[..., Any]]:
    """The kernel and the formula of a variant."""
    return [kernel(op, variant, backend), reference(op, variant)]

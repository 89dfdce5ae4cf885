"""What layers need to keep samples apart that share a row, besides kernels: names, calls, and the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from veomni_hook.errors import SamplesError
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared import handed
from veomni_hook.kernels.shared.host_values import traced
from veomni_hook.kernels.shared.hub_functions import Held, is_upstreams, running, takes
from veomni_hook.kernels.shared.origin import name_of, underlying
from veomni_hook.kernels.shared.replacements import reached_upstream

__all__ = [
    "NAMES",
    "Packed",
    "added",
    "call",
    "expect_boundaries",
    "given_in",
    "given_of",
    "held",
    "inseparable",
    "layer_of",
    "with_parameter",
]

#: Arguments by which upstream's calls pass boundaries of samples.
NAMES = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")


@dataclass(frozen=True)
class Packed:
    """What an op needs beside its kernels where samples share a row.

    Attributes:
        operands: from the arguments of upstream's function, the operands of the op; the last are boundaries,
            or None if each row is one sample.
        run: computes samples that share a row: from the slot, the module, upstream's function, its arguments
            (without boundaries), and the operands.
    """

    operands: Callable[..., tuple[Any, ...]]
    run: Callable[[Any, Any, Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[Any, ...]], Any]


def call(
    op: Packed, slot: Any, owner: Any, upstream: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Return what a kernel of the slot computes, else upstream's function.

    Args:
        op: the op.
        slot: the `Slot` of the formula.
        owner: the module that calls.
        upstream: the function, of transformers' modeling file or of a package.
        args: of the function.
        kwargs: of the function.

    Raises:
        SamplesError: samples share a row, and nothing at hand keeps them apart.
    """
    if STATE.active and given_in(kwargs):
        # Boundaries are values, which compiled code does not have.
        return (_eagerly if traced() else _packed)(op, slot, owner, upstream, args, kwargs)
    operands = op.operands(*args, **kwargs)
    run = slot.kernel(owner, *operands, upstream)
    return upstream(*args, **kwargs) if run is None else run(*operands)


def _packed(
    op: Packed,
    slot: object,
    owner: object,
    upstream: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    operands = op.operands(*args, **kwargs)
    unnamed = {name: value for name, value in kwargs.items() if name not in NAMES}
    if operands[-1] is None:  # a row is a sample: upstream computes that, too
        return call(op, slot, owner, upstream, *args, **unnamed)
    return op.run(slot, owner, upstream, args, unnamed, operands)


_eagerly: Callable[..., Any] = torch.compiler.disable(_packed)  # type: ignore[no-untyped-call]


def expect_boundaries(owner: object, arguments: Mapping[str, object]) -> None:
    """Raise SamplesError if a call of the layer ``owner`` lacks boundaries that its model has handed down."""
    # Compiled code would depend on what runs at the moment.
    if STATE.active and not traced() and not given_in(arguments):
        handed.check(owner, layer_of(owner))


def held(function: Callable[..., object], package: object) -> Callable[..., object]:
    """Return a function that a layer holds; as a package's, if it is that which the layer's file imports."""
    return Held(function) if function is package else function


def added(arguments: dict[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a call, with the boundaries that it does not pass but its layer was given."""
    if not STATE.active:
        return arguments
    missing = {name: given[name] for name in NAMES if given.get(name) is not None}
    return {**missing, **arguments} if not given_in(arguments) else arguments


def given_in(arguments: Mapping[str, object]) -> bool:
    """Return whether boundaries of samples are among the arguments of a call."""
    return any(arguments.get(name) is not None for name in NAMES)


def given_of(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the boundaries among the arguments of a call, and the numbers of samples; None if absent."""
    *ends, numbers = map(arguments.get, NAMES)
    return next((value for value in ends if value is not None), None), numbers


def layer_of(owner: object) -> str:
    """Return the class of a layer, with its number if it has one."""
    number = getattr(owner, "layer_idx", None)
    return type(owner).__name__ if number is None else f"{type(owner).__name__} (layer {number})"


def inseparable(op: str, layer: str, why: str, fix: str = "") -> SamplesError:
    """Return the error for samples that would leak into each other; ``fix``: besides one sample a row."""
    return SamplesError(
        f"samples share a row, and nothing keeps them apart: {why}",
        where=layer,
        fix=f"{fix or f'let a kernel of {op} run (VEOMNI_KERNELS={op}=torch)'}, or pass one sample a row",
    )


def with_parameter(op: str, owner: Any, upstream: Any, names: tuple[str, ...], slot: Any) -> str:
    """Return the first of ``names`` that a function takes as the boundaries of samples.

    Args:
        op: the op.
        owner: the module that calls.
        upstream: what it calls: transformers' function, in which a package's may run, or one in its place.
        names: parameters for boundaries.
        slot: the `Slot` of the formula.

    Raises:
        SamplesError: it takes none of them, or upstream's own code would get them, which may ignore them.
    """
    outcome = slot.outcome(owner)
    why = "" if outcome is None else f" ({outcome.reason})"
    layer, function = layer_of(owner), running(upstream)
    if is_upstreams(function, owner):
        raise inseparable(op, layer, f"upstream's own code runs, which has no boundaries{why}")
    function, fix = underlying(function), ""
    if not is_upstreams(upstream, owner):  # no kernel runs in the place of a function that the user put there
        fix = f"restore upstream's function, or give yours a parameter {names[-1]} and boundaries of its own"
        if (reached := reached_upstream(function, owner)) is not None:
            calls = "" if running(function) is reached else f"{name_of(function)} calls "
            why = f"{calls}{name_of(reached)}, upstream's code, which has no boundaries"
            raise inseparable(op, layer, why, fix)
    for name in names:
        if takes(function, name):
            return name
    raise inseparable(op, layer, f"{name_of(function)} takes no boundaries{why}", fix)

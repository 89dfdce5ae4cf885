"""Calls of upstream's causal convolution in patched code: a kernel with boundaries of samples, or upstream.

Arguments stay upstream's. Where samples share a row and nothing at hand keeps them apart, a call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from veomni_hook.kernels.shared.module_calls import call_is_seen
from veomni_hook.kernels.shared.samples import indices_of, of_rows
from veomni_hook.kernels.shared.separation import Packed, added, call, expect_boundaries, held, with_parameter
from veomni_hook.kernels.shared.whole_sequences import whole

__all__ = ["called", "operands", "separated"]

_OP = "causal_conv"


def separated(
    slot: object,
    owner: object,
    upstream: Callable[..., object],
    package: object = None,
    given: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """Return what to call instead of ``upstream``, with the same arguments.

    Args:
        slot: the `Slot` of the formula.
        owner: the module that calls.
        upstream: the function, of transformers' modeling file or of a package.
        package: the function that the layer's file imports from a package, where the layer may hold it.
        given: the layer's arguments, if the call does not pass all boundaries that are among them.

    The result raises SamplesError, with the layer's name, if ``cu_seq_lens_q``, ``cu_seqlens`` or ``seq_idx``
    say that samples share a row and neither a kernel nor ``upstream`` takes these boundaries.
    """
    run = whole(_OP, owner, partial(call, _CALLS, slot, owner, held(upstream, package)))

    # A name for errors of Python about arguments: that of a partial object is all it holds.
    def causal_conv(*args: object, **kwargs: object) -> object:
        kwargs = kwargs if given is None else added(kwargs, given)
        expect_boundaries(owner, kwargs)
        first = (kwargs.pop("x"),) if "x" in kwargs else ()  # what a package calls it
        return run(*first, *args, **kwargs)

    return causal_conv


def called(module: nn.Module, upstream: Callable[..., object]) -> Callable[..., object]:
    """Return ``upstream``, which calls a convolution; kernels refuse it where its calls do something else."""
    what = type(module).__name__ if type(module) is not nn.Conv1d else call_is_seen(module)
    if what is None:
        return upstream

    def own(*args: object, **kwargs: object) -> object:
        return upstream(*args, **kwargs)

    own.__qualname__ = f"a convolution that {what}"
    return own


def _run(
    slot: Any,
    owner: Any,
    upstream: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    operands: tuple[Any, ...],
) -> Any:
    hidden_states, bounds = operands[0], operands[-1]
    if (run := slot.kernel(owner, *operands, upstream)) is not None:
        return run(*operands)
    name = with_parameter(_OP, owner, upstream, ("seq_idx", "cu_seqlens"), slot)
    bounds_or_indices = bounds if name == "cu_seqlens" else indices_of(bounds, hidden_states.shape[0])
    return upstream(*args, **{**kwargs, name: bounds_or_indices})


def operands(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    **others: object,
) -> tuple[Any, ...]:
    """Return the operands of the op."""
    rows, _, positions = hidden_states.shape
    bounds = of_rows(rows, positions, cu_seqlens if cu_seq_lens_q is None else cu_seq_lens_q, seq_idx)
    return (hidden_states, weight, bias, activation, bounds)


_CALLS = Packed(operands, _run)

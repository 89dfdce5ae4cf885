"""Calls of upstream's gated delta rule in patched code: a kernel with the boundaries of samples, or upstream.

Arguments stay upstream's. Where samples share a row and nothing at hand keeps them apart, a call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from veomni_hook.kernels.shared.samples import last_of_rows, of_rows
from veomni_hook.kernels.shared.separation import (
    Packed,
    added,
    call,
    expect_boundaries,
    held,
    inseparable,
    layer_of,
    with_parameter,
)
from veomni_hook.kernels.shared.whole_sequences import whole

__all__ = ["operands", "separated"]

_OP = "gated_delta_rule"


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
    say that samples share a row and neither a kernel nor ``upstream`` takes these boundaries, or if such a
    row continues a cache. A cache that begins with such a row gets the state of its last sample.
    """
    run = whole(_OP, owner, partial(call, _CALLS, slot, owner, held(upstream, package)))

    # A name for errors of Python about arguments: that of a partial object is all it holds.
    def gated_delta_rule(*args: object, **kwargs: object) -> Any:
        kwargs = kwargs if given is None else added(kwargs, given)
        expect_boundaries(owner, kwargs)
        return run(*args, **kwargs)

    return gated_delta_rule


def _run(
    slot: Any,
    owner: Any,
    upstream: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: tuple[Any, ...],
) -> Any:
    value, initial_state, keeps, bounds = operands[2], operands[5], operands[6], operands[-1]
    if initial_state is not None:
        raise inseparable(_OP, layer_of(owner), "the row continues the state of a cache")
    if (run := slot.kernel(owner, *operands, upstream)) is not None:
        output, final = run(*operands)
    else:
        name = with_parameter(_OP, owner, upstream, ("cu_seqlens",), slot)
        output, final = upstream(*args, **{**kwargs, name: bounds})
    return output, final[last_of_rows(bounds, value.shape[0])] if keeps else final


def operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    """Return the operands of the op; the length of chunks changes only the rounding."""
    ends = cu_seqlens if cu_seq_lens_q is None else cu_seq_lens_q
    bounds = of_rows(value.shape[0], value.shape[1], ends, seq_idx)
    options = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
    return (query, key, value, g, beta, *options, bounds)


_CALLS = Packed(operands, _run)

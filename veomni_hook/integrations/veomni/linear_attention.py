"""Linear attention with the arguments of VeOmni's slots, for a slot that nobody bound.

VeOmni has no eager code for these: its models raise. `UNBOUND` has ours by the op of the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.declaration import EAGER, Kernel
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.selection.select import select, system_of
from veomni_hook.kernels.shared.samples import of_rows

__all__ = ["UNBOUND"]

#: Runs on every device, and in place of eager code, which there is none of.
_ANYWHERE = "torch"


def _causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """``x`` is ``[rows, positions, channels]``; the second value would be the last positions."""
    rows, positions, _channels = x.shape
    bounds = None if cu_seqlens is None else of_rows(rows, positions, cu_seqlens, None)
    output = _computed("causal_conv", "depthwise", x.transpose(1, 2), weight, bias, activation, bounds)
    return output.transpose(1, 2), None


def _chunk_gated_delta_rule(  # noqa: PLR0913 - VeOmni's arguments
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    bounds = None if cu_seqlens is None else of_rows(value.shape[0], value.shape[1], cu_seqlens, None)
    options = (initial_state, output_final_state, use_qk_l2norm_in_kernel, bounds)
    return _computed("gated_delta_rule", "scalar_decay", query, key, value, g, beta, *options)  # type: ignore[no-any-return]


#: By the op of the slot.
UNBOUND: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d": _causal_conv1d,
    "chunk_gated_delta_rule": _chunk_gated_delta_rule,
}


def _computed(op: str, variant: str, *operands: Any) -> Any:
    device = operands[0].device.type
    for kernel in _kernels(op, variant, device, STATE.epoch, registry.version):
        if kernel.refuses is None or load_attribute(kernel.refuses)(None, *operands) is None:
            return load_attribute(kernel.load)(*operands)
    return load_attribute(registry.op(op).variants[variant].reference)(*operands)


@lru_cache(maxsize=8)
def _kernels(op: str, variant: str, device: str, epoch: int, version: int) -> tuple[Kernel, ...]:
    """Candidates for a device; ``epoch`` and ``version`` identify the settings."""
    wanted = STATE.effective.backend(op)
    choice = Choice(ops={op: _ANYWHERE if wanted == EAGER else wanted}, invariant=STATE.choice.invariant)
    return (
        select(op, variant, choice, system_of(device))
        .checked("a slot of VeOmni that nobody bound")
        .candidates
    )

"""Linear attention with the arguments of VeOmni's slots, for a slot that nobody bound.

VeOmni has no eager code for these: its models raise. `UNBOUND` has ours by the op of the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from veomni_hook.kernels.causal_conv import calls as causal_conv
from veomni_hook.kernels.gated_delta_rule import calls as gated_delta_rule
from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.declaration import EAGER, Kernel
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.selection.select import select, system_of

__all__ = ["UNBOUND"]

#: Runs on every device, and in place of eager code, which there is none of.
_ANYWHERE = "torch"


def _causal_conv1d(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """``x`` is ``[rows, positions, channels]``; the second value would be the last positions."""
    output = _computed("causal_conv", "depthwise", *causal_conv.operands(x.transpose(1, 2), *args, **kwargs))
    return output.transpose(1, 2), None


def _chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    operands = gated_delta_rule.operands(*args, **kwargs)
    return _computed("gated_delta_rule", "scalar_decay", *operands)  # type: ignore[no-any-return]


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

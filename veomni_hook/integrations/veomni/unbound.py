"""What VeOmni's code gets where VeOmni's trainer installed no loss and bound no kernels.

`veomni_hook.patches.verbs.runtime` writes these calls into the code of configs. What VeOmni, or a user, has
put in force stays: a loss of another origin than transformers, a slot that is bound. For linear attention,
VeOmni has no eager code: its models raise, so a slot that nobody bound gets our kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from veomni_hook.integrations.veomni.losses import Outputs, log_probs
from veomni_hook.kernels.causal_conv import calls as causal_conv
from veomni_hook.kernels.gated_delta_rule import calls as gated_delta_rule
from veomni_hook.kernels.linear_cross_entropy.losses import HOME
from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.declaration import EAGER, Kernel
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.selection.select import select, system_of
from veomni_hook.kernels.shared.origin import underlying, written_in

__all__ = ["is_eager", "kernel_of", "loss_of"]

#: What VeOmni's losses take beside transformers' arguments; losses of logits use none of it.
_OWN = (
    "hidden_states", "weights", "return_log_probs", "temperature", "teacher_topk_ids",
    "teacher_topk_log_probs", "log_prob_min_clamp", "chunk_size",
)  # fmt: skip


def loss_of(model: Any, count: int) -> Callable[..., Any]:
    """Return ``model.loss_function``; if that is transformers' own, a function that returns ``count`` values.

    They are the loss, logits in rows, and None for each other one; with ``return_log_probs=True``, None twice
    and log-probabilities (`log_probs`). The function takes what transformers' loss takes, and VeOmni's
    keywords; ``logits=None`` means those of ``hidden_states`` and ``weights``. With ``num_labels``, each
    position has a label, which is not shifted.
    """
    function = model.loss_function
    if written_in(underlying(function))[0] != HOME:
        return function  # type: ignore[no-any-return]
    return partial(_values, function, count)


def _values(function: Callable[..., Tensor], count: int, **given: Any) -> Outputs:
    values: tuple[Any, ...]
    if given.get("return_log_probs") and "num_labels" not in given:
        values = None, None, log_probs(**given)
    else:
        logits = given.pop("logits", None)
        if logits is None:
            logits = functional.linear(given["hidden_states"], given["weights"])
        rest = {name: value for name, value in given.items() if name not in _OWN}
        loss = _of_positions(logits, **rest) if "num_labels" in rest else function(logits=logits, **rest)
        values = loss, logits.reshape(-1, logits.shape[-1])
    return (*values, *[None] * count)[:count]


def _of_positions(
    logits: Tensor,
    labels: Tensor,
    num_labels: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **others: object,
) -> Tensor:
    from transformers.loss.loss_utils import fixed_cross_entropy

    target = labels.reshape(-1).to(logits.device)
    rows = logits.float().reshape(-1, num_labels)
    return fixed_cross_entropy(rows, target, num_items_in_batch, ignore_index, **others)  # type: ignore[no-any-return]


def is_eager(slot: Any) -> bool:
    """Return whether eager code runs: it is bound to a slot, or nothing is."""
    return bool(slot.use_eager_impl) or not slot.is_bound


def kernel_of(slot: Any) -> Callable[..., Any] | None:
    """Return the kernel of a slot; if nothing is bound, ours for what has no eager code, or None."""
    if slot.is_bound:
        return slot.bound_kernel()  # type: ignore[no-any-return]
    return _UNBOUND.get(slot.op_name)


#: Runs on every device, and in place of eager code, which there is none of.
_ANYWHERE = "torch"


def _causal_conv1d(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """``x`` is ``[rows, positions, channels]``; the second value would be the last positions."""
    output = _computed("causal_conv", "depthwise", *causal_conv.operands(x.transpose(1, 2), *args, **kwargs))
    return output.transpose(1, 2), None


def _chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    operands = gated_delta_rule.operands(*args, **kwargs)
    return _computed("gated_delta_rule", "scalar_decay", *operands)  # type: ignore[no-any-return]


#: Linear attention with the arguments of VeOmni's slots, by the op of the slot.
_UNBOUND: Mapping[str, Callable[..., Any]] = {
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

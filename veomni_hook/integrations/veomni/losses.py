"""The linear cross-entropy with the arguments and results of VeOmni's loss wrappers.

VeOmni's own wrappers shift labels, and under sequence parallelism they reduce the loss. Here they get our
kernel for the loss. Log-probabilities, entropies and the distillation of a teacher's top k tokens come from
our kernel as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from veomni_hook.errors import KernelError
from veomni_hook.integrations.veomni.backend import kernel_of, name_of, unmet
from veomni_hook.integrations.veomni.upstream import attribute
from veomni_hook.kernels.linear_cross_entropy import requested_call
from veomni_hook.kernels.linear_cross_entropy.functional import linear_cross_entropy, token_log_probs

__all__ = ["Outputs", "causal_lm_loss", "log_probs", "sequence_classification_loss"]

_HOME, _WHERE = "veomni.ops.kernels.cross_entropy", "the loss of veomni_hook in VeOmni"


#: Loss, logits, and what else VeOmni's own loss returns.
Outputs = tuple[Any, Any, Any]


def causal_lm_loss(backend: str) -> Callable[..., Outputs]:
    """``(logits, labels, vocab_size, ..., hidden_states=, weights=)`` for the next token.

    Returns ``loss, logits, aux``. With ``return_log_probs=True``, loss and logits are None and ``aux`` has
    ``log_probs`` and ``entropy``.
    """
    wrapper = attribute(_HOME, "ForCausalLMLoss")
    of_rows = _cross_entropy(backend)

    def loss(
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: object = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: object,
    ) -> Outputs:
        if requested_call.asks(kwargs):
            return None, None, log_probs(labels, ignore_index, shift_labels, backend=backend, **kwargs)
        found: Outputs = wrapper(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels,
            cross_entropy_fn=of_rows, **kwargs,
        )  # fmt: skip
        return found

    loss.__name__ = f"{name_of(backend)}_causal_lm_loss"
    return loss


def log_probs(
    labels: Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    backend: str | None = None,
    **options: Any,
) -> Any:
    """Return VeOmni's ``FusedLinearAuxOutput``: ``log_probs`` and ``entropy``, or those of a distillation.

    They are float32, in the shape of the labels.

    Args:
        labels: a token for each position; under sequence parallelism, the collator has shifted them.
        ignore_index: the label of positions that get zeros.
        shift_labels: the token that each position predicts; None: made of ``labels``.
        backend: that of our kernel; None: what settings choose.
        options: ``hidden_states`` and ``weights``, and what else VeOmni's loss takes.
    """
    target, teacher = shift_labels, requested_call.teacher_of(options, _WHERE)
    if target is None and labels is not None:
        target = labels
        state = attribute("veomni.distributed.parallel_state", "get_parallel_state")
        if not state().sp_enabled:
            target = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            teacher = None if teacher is None else teacher.shifted()
    hidden_states, weights = _needed(options.get("hidden_states"), options.get("weights"))
    if target is None:
        raise _wrong("log-probabilities need labels", "pass labels or shift_labels")
    temperature = options.get("temperature", 1.0)
    statistics = token_log_probs(
        hidden_states, weights, target.to(hidden_states.device), ignore_index=ignore_index,
        scale=None if temperature == 1 else 1 / temperature, entropy=True, teacher=teacher, backend=backend,
    )  # fmt: skip
    fields = {name: getattr(statistics, name) for name in requested_call.fields_of(options)}
    # Masses have no gradient.
    fields = {name: value.detach() if name.endswith("mass") else value for name, value in fields.items()}
    return attribute("veomni.utils.model_outputs", "FusedLinearAuxOutput")(**fields)


def sequence_classification_loss(backend: str) -> Callable[..., Outputs]:
    """``(logits, labels, num_labels, ..., hidden_states=, weights=)`` with a label for each position."""
    wrapper = attribute(_HOME, "ForSequenceClassificationLoss")
    return partial(wrapper, cross_entropy_fn=_cross_entropy(backend))


def _cross_entropy(backend: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the function that VeOmni's wrappers call with shifted labels and rows of hidden states."""
    unmet(kernel_of("linear_cross_entropy", "next_token", backend))

    def of_rows(
        logits: Tensor | None,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        *,
        hidden_states: Tensor | None = None,
        weights: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        hidden_states, weights = _needed(hidden_states, weights)
        loss = linear_cross_entropy(
            hidden_states, weights, labels, ignore_index=ignore_index, num_items=num_items_in_batch,
            backend=backend,
        )  # fmt: skip
        return loss, logits

    of_rows.__name__ = f"{name_of(backend)}_cross_entropy"
    return of_rows


def _needed(hidden_states: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    if isinstance(hidden_states, torch.Tensor) and isinstance(weights, torch.Tensor):
        return hidden_states, weights
    raise _wrong(
        "the loss got no hidden_states or no weights, and it is computed from them, not from logits",
        "set cross_entropy_loss_implementation to eager for this model",
    )


def _wrong(what: str, fix: str) -> KernelError:
    return KernelError(what, where=_WHERE, fix=fix)

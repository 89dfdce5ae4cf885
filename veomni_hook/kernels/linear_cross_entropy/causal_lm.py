"""The causal language-model loss of transformers, asked for by a guard and computed inside ``lm_head``.

What is honoured is what transformers' ``ForCausalLMLoss`` reads: ``num_items_in_batch``, ``ignore_index``
and ``shift_labels``; every other keyword is swallowed there and so here. The loss function is trusted only
after it has given the known answers to small questions, because others (Liger, Unsloth) replace parts of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional

from veomni_hook.kernels.linear_cross_entropy import head, output, reference
from veomni_hook.kernels.operands import not_plain, untraceable

__all__ = ["Call", "fused_output", "refuses"]

_LOSS_HOME = ("transformers.loss.loss_utils", "ForCausalLMLoss")
_known_losses: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


def refuses(
    model: Any, hidden_states: torch.Tensor, labels: Any, vocab_size: int, loss_kwargs: Mapping[str, Any]
) -> str | None:
    """Return why the loss of this call must come from the upstream code, or None."""
    if not model.training:
        return "the model is in eval mode, where logits are what callers read"
    if not torch.is_grad_enabled():
        return "gradients are disabled"
    if getattr(model, "_is_replica", False):
        return "the model is a replica of nn.DataParallel, which gathers logits"
    return (
        output.logits_are_read(model)
        or not_plain(hidden_states, labels)
        or untraceable()
        or head.refuses(model.lm_head)
        or _loss_refuses(model.loss_function)
        or _arguments_refuse(hidden_states, labels, vocab_size, loss_kwargs, model.lm_head.out_features)
    )


class Call(NamedTuple):
    """One call of a model: ``hidden_states`` ``[..., hidden]``, ``labels`` one int64 for each position."""

    model: Any
    hidden_states: torch.Tensor
    labels: torch.Tensor
    vocab_size: int
    loss_kwargs: Mapping[str, Any]
    output_class: Any
    output_kwargs: Mapping[str, Any]


def fused_output(compute: Callable[..., torch.Tensor], call: Call) -> Any:
    """Return the output with the loss from ``compute`` and logits that are computed on first access.

    ``compute`` is called as `reference.linear_cross_entropy`. If the head turns the request down the loss is
    upstream's, from logits.
    """
    model, hidden_states, labels, vocab_size, loss_kwargs, output_class, output_kwargs = call
    ignore_index = loss_kwargs.get("ignore_index", -100)
    options = {"ignore_index": ignore_index, "num_items": loss_kwargs.get("num_items_in_batch")}
    target = _targets(labels, loss_kwargs.get("shift_labels"), ignore_index).to(hidden_states.device)
    request = head.LossRequest(compute, target, options)
    answer = model.lm_head(head.LossInput(hidden_states, request))
    if request.loss is None:
        output.note_refusal(model, request.reason or "lm_head did not call torch.nn.functional.linear")
        loss = model.loss_function(logits=answer, labels=labels, vocab_size=vocab_size, **loss_kwargs)
        return output_class(loss=loss, logits=answer, **output_kwargs)
    # A hook that casts what leaves the module would round the loss, where upstream rounds logits.
    loss = answer if answer.dtype is request.loss.dtype else request.loss
    deferred = output.DeferredLogits(model, hidden_states)
    return output.with_deferred_logits(output_class, {"loss": loss, **output_kwargs}, deferred)


def _targets(labels: torch.Tensor, shift_labels: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def _arguments_refuse(  # noqa: PLR0911 - one return a refusal
    hidden_states: torch.Tensor,
    labels: Any,
    vocab_size: int,
    loss_kwargs: Mapping[str, Any],
    out_features: int,
) -> str | None:
    if vocab_size != out_features:
        return "vocab_size is not the width of lm_head"
    if not isinstance(loss_kwargs.get("ignore_index", -100), int):
        return "ignore_index is no int"
    shift_labels = loss_kwargs.get("shift_labels")
    target = labels if shift_labels is None else shift_labels
    reason = not_plain(target)
    if reason is not None:
        return reason
    if target.dtype is not torch.int64 or target.numel() != hidden_states.shape[:-1].numel():
        return "labels are not one int64 for each position"
    if shift_labels is not None and not shift_labels.is_contiguous():
        return "shift_labels is not contiguous"
    num_items = loss_kwargs.get("num_items_in_batch")
    if isinstance(num_items, torch.Tensor):
        if not_plain(num_items) or num_items.numel() != 1 or num_items.requires_grad:
            return "num_items_in_batch is not one plain number"
    elif not isinstance(num_items, int | float | None):
        return f"num_items_in_batch is a {type(num_items).__name__}"
    return None


def _loss_refuses(loss_function: Any) -> str | None:
    try:
        return _known_losses[loss_function]
    except (KeyError, TypeError):
        reason = _examine(loss_function)
    if callable(loss_function) and hasattr(loss_function, "__code__"):
        _known_losses[loss_function] = reason
    return reason


def _examine(loss_function: Any) -> str | None:
    name = getattr(loss_function, "__qualname__", type(loss_function).__qualname__)
    if (getattr(loss_function, "__module__", None), name) != _LOSS_HOME:
        return f"the model has a loss_function of its own ({name})"
    logits = torch.arange(20, dtype=torch.float32, device="cpu").sin().reshape(1, 4, 5)
    labels = torch.tensor([[1, 4, -100, 2]], device="cpu")
    shifted = torch.tensor([[3, 4, 0, 1]], device="cpu")
    questions: tuple[dict[str, Any], ...] = (
        {},
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(5, device="cpu"), "ignore_index": 4, "shift_labels": shifted},
        {"shift_labels": shifted, "position_ids": None, "label_smoothing": 0.5},
    )
    for question in questions:
        ignore_index = question.get("ignore_index", -100)
        target = _targets(labels, question.get("shift_labels"), ignore_index)
        expected = reference.linear_cross_entropy(
            logits.reshape(-1, 5),
            torch.eye(5, dtype=torch.float32, device="cpu"),
            None,
            target,
            ignore_index=ignore_index,
            num_items=question.get("num_items_in_batch"),
        )
        try:
            answer = loss_function(logits=logits, labels=labels, vocab_size=5, **question)
        except Exception as error:
            return f"transformers' causal-LM loss does not answer as known ({type(error).__name__})"
        if not torch.allclose(answer, expected, rtol=1e-4, atol=1e-5):
            return f"transformers' causal-LM loss does not answer as known for {sorted(question)}"
    return None

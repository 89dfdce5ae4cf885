"""A language model's loss, requested by a guard in its ``forward`` and computed inside its head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.linear_cross_entropy import head as heads
from veomni_hook.kernels.linear_cross_entropy import losses, output, reference, shares, token_outputs, traced
from veomni_hook.kernels.linear_cross_entropy.autograd import compute_dtype
from veomni_hook.kernels.linear_cross_entropy.call import Call
from veomni_hook.kernels.linear_cross_entropy.deferred import DeferredLogits, logits_are_read, note_refusal
from veomni_hook.kernels.linear_cross_entropy.objective import NOTHING, TokenStatistics
from veomni_hook.kernels.linear_cross_entropy.options import (
    EVALUATION,
    NO_GRADIENTS,
    active,
    leave_to_upstream,
    note,
    token_outputs_of,
)
from veomni_hook.kernels.selection.binding import wanted_by
from veomni_hook.kernels.selection.declaration import REFERENCE
from veomni_hook.kernels.shared.history import following
from veomni_hook.kernels.shared.module_calls import call_is_seen, is_as_written
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["Call", "Fused", "fused_output", "reference_output", "refuses", "settled"]

Compute = Callable[..., tuple[torch.Tensor, TokenStatistics]]
Statistics = Callable[..., TokenStatistics]


class Fused(NamedTuple):
    """What a guard gets; it passes the output made with ``loss`` and ``logits`` through ``finish``."""

    loss: torch.Tensor
    logits: Any
    finish: Callable[[Any], Any]


def refuses(model: object, *operands: object) -> str | None:
    """Return why the upstream code should, or must, compute the loss of this call, or None.

    The formula, which is chosen for checks, computes each loss that it can. Raises KernelError if upstream's
    code must, but `loss_options` change the loss.
    """
    compiling = torch.compiler.is_compiling()
    by_name = wanted_by(model, "linear_cross_entropy") == REFERENCE
    own_loss = not compiling and losses.is_veomnis(getattr(model, "loss_function", None))
    if by_name or token_outputs_of(model, *operands) or own_loss:
        return settled(model, _cannot(model, *operands), *operands)
    if compiling:
        return _untrained(model) or _cannot(model, *operands)
    request = active(model)
    reason = None if request is not None and request.options.evaluation else _untrained(model)
    return settled(model, reason or logits_are_read(model) or _cannot(model, *operands))


def settled(model: object, reason: str | None, *operands: object) -> str | None:
    """Return ``reason``, after telling whoever asks for more than a loss that the upstream code runs."""
    if reason is not None:
        leave_to_upstream(model, reason, *operands)
    return reason


def _untrained(model: Any) -> str | None:
    if not model.training:
        return EVALUATION
    return None if torch.is_grad_enabled() else NO_GRADIENTS


def _cannot(model: Any, *operands: object) -> str | None:
    if getattr(model, "_is_replica", False):
        return "the model is a replica of nn.DataParallel, which gathers logits"
    call = Call.of(model, *operands)
    if torch.compiler.is_compiling():
        reason = traced.refuses(call) or traced.loss_function_refuses(model.loss_function)
        return reason or _rest_refuses(call, call.head)
    linear = heads.last_linear(model, call.head)
    return (
        untraceable()
        or heads.refuses(call.head, linear)
        or losses.refuses(model.loss_function)
        or _rest_refuses(call, linear)
    )


def _rest_refuses(call: Call, linear: Any) -> str | None:
    reason = (
        not_plain(call.hidden_states)
        or _labels_refuse(call)
        or _arguments_refuse(call, linear.out_features)
        or _cap_refuses(call)
        or call.transform.refuses()
    )
    # Kernels transform logits in float32, whatever their dtype.
    if reason or call.transform.dtype in (None, torch.float32, compute_dtype(call.hidden_states)):
        return reason
    return f"logits are rounded to {call.transform.dtype}"


def _cap_refuses(call: Call) -> str | None:
    if "capped_by" not in call.options:
        return None
    module, kind, _ = call.options["capped_by"]
    if type(module) is not kind or not is_as_written(kind):
        return f"logits are not capped by {kind.__name__} as it is written"
    if call.transform.softcap is None:
        return "the cap of the logits is None"
    seen = call_is_seen(module)
    return seen and f"the module that caps logits {seen}"


def fused_output(compute: Compute, statistics: Statistics, *operands: object) -> Fused:
    """Return the loss from ``compute``, and logits that are computed on first access.

    ``operands`` are the fields of a `Call`. ``compute`` is called like `reference.loss_and_statistics`, and
    ``statistics``, if the output gets fields of them, like `reference.token_statistics`. If the head rejects
    the request, upstream computes loss and logits.
    """
    call = Call.of(*operands)
    model, head, transform = call.model, call.head, call.transform
    before_head = call.options.get("before_head")
    hidden_states = call.hidden_states if before_head is None else before_head(call.hidden_states)
    if torch.compiler.is_compiling():
        return _traced_output(compute, statistics, call, hidden_states)
    number = following()
    objective, wanted = call.objective
    held = active(model)
    reports = held is not None and held.options.wanted != NOTHING
    names = call.names
    target = call.shifted(call.labels, objective.ignore_index).to(hidden_states.device)
    of_tokens: list[TokenStatistics] = []
    linear, whole = heads.last_linear(model, head), shares.Part(None, hidden_states, target, objective)
    # A plain head that computes nothing but the loss needs this process's positions alone.
    alone = linear is head and not (reports or names or call_is_seen(linear))
    part = shares.own_positions(model, whole) if alone else whole

    def loss_of(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
    ) -> torch.Tensor:
        if part.group is not None:
            return part.group.all_averaged(compute(rows, weight, bias, target, part.objective, wanted)[0])
        group = None if reports else shares.share_of(model, rows.shape[0])
        if names:
            request = (rows, weight, bias, target, objective)
            vector, of_rows = token_outputs.packed(compute, statistics, request, wanted, names, group)
            of_tokens.append(of_rows)
            return vector
        if group is not None:
            own, labels, share = shares.part_of(group, rows, target, objective)
            return group.all_averaged(compute(own, weight, bias, labels, share, wanted)[0])
        loss, of_rows = compute(rows, weight, bias, target, objective, wanted)
        of_tokens.append(of_rows)
        return loss

    request = heads.LossRequest(loss_of, part.target)
    answer = heads.ask(head, linear, part.hidden_states, request)
    if request.loss is None or request.call is None:
        logits = transform(answer if part.group is None else head(hidden_states))
        return _turned_down(call, request, logits)
    if held is not None:
        held.report.take(of_tokens[-1] if reports else None, target, objective.ignore_index, call.given.shape)
    note(model, number, answer)
    if part.group is not None:
        request.call.hidden_states = hidden_states
    deferred = DeferredLogits(model, head, linear, hidden_states, request.call, transform)
    # A hook that casts the module's output would round the loss; upstream rounds logits there. FSDP2 gathers
    # weights for the backward of what its hook got, not of what it cast.
    answer = answer if answer.dtype is request.loss.dtype else request.loss
    if not names:
        return Fused(answer, deferred, output.with_deferred_logits)
    loss, values = token_outputs.fields(answer, names, call.given.shape, objective.num_items)
    return Fused(loss, deferred, partial(output.with_deferred_logits, more=call.fields_among(values)))


def _turned_down(call: Call, request: heads.LossRequest, logits: torch.Tensor) -> Fused:
    """Return upstream's loss."""
    model, reason = call.model, request.reason or "the head did not call torch.nn.functional.linear"
    note_refusal(model, reason, training=bool(model.training))
    settled(model, reason, *call[1:])
    loss = model.loss_function(
        logits=logits, labels=call.labels, vocab_size=call.vocab_size, **call.loss_kwargs
    )
    return Fused(loss, logits, lambda output: output)


#: By the plain definition.
reference_output = partial(fused_output, reference.loss_and_statistics, reference.token_statistics)


def _traced_output(
    compute: Compute, statistics: Statistics, call: Call, hidden_states: torch.Tensor
) -> Fused:
    objective, wanted = call.objective
    target = call.shifted(call.labels, objective.ignore_index).to(hidden_states.device)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    request = (rows, call.head.weight, call.head.bias, target, objective)
    logits = traced.TracedLogits(call.head, call, hidden_states)
    if not (names := call.names):
        return Fused(compute(*request, NOTHING)[0], logits, output.with_deferred_logits)
    vector, _ = token_outputs.packed(compute, statistics, request, wanted, names)
    loss, values = token_outputs.fields(vector, names, call.given.shape, objective.num_items)
    return Fused(loss, logits, partial(output.with_deferred_logits, more=call.fields_among(values)))


def _labels_refuse(call: Call) -> str | None:
    shift_labels, target = call.shift_labels, call.given
    reason = not_plain(target)
    if reason is not None:
        return reason
    if target.dtype is not torch.int64 or target.numel() != call.hidden_states.shape[:-1].numel():
        return "labels are not int64 with one label for each position"
    # Upstream's code needs that.
    if shift_labels is not None and not shift_labels.is_contiguous() and not call.names:
        return "shift_labels is not contiguous"
    return None


def _arguments_refuse(call: Call, out_features: int) -> str | None:
    if call.vocab_size != out_features:
        return "vocab_size differs from the width of the head"
    if not isinstance(call.loss_kwargs.get("ignore_index", -100), int):
        return "ignore_index is not an int"
    num_items = call.loss_kwargs.get("num_items_in_batch")
    if isinstance(num_items, torch.Tensor):
        if not_plain(num_items) or num_items.numel() != 1 or num_items.requires_grad:
            return "num_items_in_batch is not a single number"
    elif not isinstance(num_items, (int, float, type(None))):
        return f"num_items_in_batch is a {type(num_items).__name__}"
    return None

"""Linear cross-entropy and token statistics as functions of tensors."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import TypeAlias

import torch

from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy.objective import (
    NOTHING,
    Objective,
    Teacher,
    TokenStatistics,
    Transform,
    Wanted,
)
from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.declaration import EAGER, REFERENCE
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import select, system_of
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.repeated import decided

__all__ = ["is_eager", "linear_cross_entropy", "token_log_probs"]

#: Rows, weight, bias and targets.
_Operands: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]"
_OP, _VARIANT = "linear_cross_entropy", "next_token"
_BACKENDS = ("triton", "npu", "torch", "liger", REFERENCE)


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: torch.Tensor | float | None = None,
    loss_weights: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    accumulate: str = "weight",
    teacher: Teacher | None = None,
    distillation: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the cross-entropy of ``softcap * tanh(scale * (hidden_states @ weight.T + bias) / softcap)``.

    The full logits never exist at once, in forward or backward. Gradients are computed with the loss.

    Args:
        hidden_states: ``[..., hidden]``.
        weight: ``[vocab, hidden]``, in the dtype of the hidden states (dtypes may differ under autocast).
        target: the token of each position, ``[...]`` int64; this function does not shift it.
        bias: ``[vocab]``.
        ignore_index: the target value of ignored positions.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: factor of each position's squared logsumexp.
        num_items: divisor of the sum; None: the number of positions that are not ignored (or the sum of
            their weights).
        loss_weights: a factor for each position, ``[...]``; gets no gradient.
        softcap: caps the logits; None: no cap.
        scale: multiplies the logits; None: 1.
        accumulate: ``"float32"`` sums the weight's gradient in float32; ``"weight"`` in its dtype.
        teacher: the most probable tokens of a teacher at each position.
        distillation: the share of each position's loss, from 0 to 1, that is the divergence from the teacher.
        backend: ``triton``, ``npu``, ``torch``, ``liger``, ``reference``; None: the backend that settings
            select for the op (under ``torch.compile``: the best one for the device).

    Returns:
        The loss, a float32 scalar.

    Raises:
        KernelError: a value is not valid, or ``backend`` cannot compute this.
    """
    objective = Objective(
        ignore_index, num_items, Transform(scale=scale, softcap=softcap), label_smoothing, z_loss,
        None if loss_weights is None else loss_weights.reshape(-1), accumulate, teacher, distillation,
    )  # fmt: skip
    call = _rows("linear_cross_entropy", hidden_states, weight, bias, target, objective)
    objective = objective._replace(teacher=None if teacher is None else teacher.rows())
    if loss_weights is not None and loss_weights.shape != target.shape:
        raise KernelError(
            f"loss_weights have the shape {[*loss_weights.shape]}, the target {[*target.shape]}",
            where="linear_cross_entropy",
            fix="pass a factor for each position, in the shape of the target",
        )
    loss: torch.Tensor = _module(backend, call, objective, NOTHING).loss_and_statistics(
        *call, objective, NOTHING
    )[0]
    return loss


def token_log_probs(
    hidden_states: torch.Tensor | object,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float = 1.0,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    scale: float | None = None,
    entropy: bool = False,
    predictions: bool = False,
    accumulate: str = "weight",
    teacher: Teacher | None = None,
    backend: str | None = None,
) -> TokenStatistics:
    """Return the log-probability of each target and, on request, entropy, predictions and a divergence.

    The full logits never exist at once; backward recomputes them. ``log_probs``, ``entropy``,
    ``distillation_losses`` and ``student_mass`` have gradients with respect to hidden states, weight and
    bias. Positions are independent, so a process may pass the part of a sequence that it has.

    Args:
        hidden_states: ``[..., hidden]``, or the output of a model: its ``last_hidden_state``, or else the
            last of its ``hidden_states``.
        weight: ``[vocab, hidden]``, gathered if it is sharded.
        target: the token that each position predicts, ``[...]`` int64; this function does not shift it.
        temperature: divides the logits, after ``scale`` and ``softcap``.
        bias: ``[vocab]``.
        ignore_index: the target value of ignored positions.
        softcap: caps the logits; None: no cap.
        scale: multiplies the logits; None: 1.
        entropy: whether to return entropies.
        predictions: whether to return the most probable tokens.
        accumulate: as of `linear_cross_entropy`.
        teacher: the most probable tokens of a teacher at each position: whether to return the divergence.
        backend: likewise.

    Returns:
        ``TokenStatistics(log_probs, entropy, predictions, distillation_losses, student_mass, teacher_mass)``,
        each in the shape of ``target``, or None if not requested. Ignored positions have ``ignore_index`` as
        their prediction, else 0.

    Raises:
        KernelError: a value is not valid, an output has no hidden states, or ``backend`` cannot do this.
    """
    if not isinstance(hidden_states, torch.Tensor):
        hidden_states = _last_of(hidden_states)
    transform = Transform(scale=scale, softcap=softcap).at(temperature, "token_log_probs")
    objective = Objective(ignore_index, transform=transform, accumulate=accumulate, teacher=teacher)
    wanted = Wanted(True, entropy, predictions, teacher is not None)
    call = _rows("token_log_probs", hidden_states, weight, bias, target, objective)
    objective = objective._replace(teacher=None if teacher is None else teacher.rows())
    statistics: TokenStatistics = _module(backend, call, objective, wanted).token_statistics(
        *call, objective, wanted
    )
    return statistics.shaped(target.shape)


def is_eager() -> bool:
    """Return whether settings leave log-probabilities that a trainer computes to the trainer's own code."""
    return decided((_OP, EAGER), lambda: STATE.effective.backend(_OP) == EAGER)


def _last_of(output: object) -> torch.Tensor:
    """Return the hidden states that a head takes, of a model's output."""
    last = getattr(output, "last_hidden_state", None)
    if last is None and (every := getattr(output, "hidden_states", None)):
        last = every[-1]
    if not isinstance(last, torch.Tensor):
        raise KernelError(
            f"{type(output).__name__} has neither last_hidden_state nor hidden_states",
            where="token_log_probs",
            fix="call the model with output_hidden_states=True, or pass the hidden states",
        )
    return last


def _rows(
    caller: str,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    objective: Objective,
) -> _Operands:
    operands = tuple(tensor for tensor in (hidden_states, weight, bias, target) if tensor is not None)
    positions, rows = [*hidden_states.shape[:-1]], [*weight.shape]
    wrong = fix = None
    if (wrong := not_plain(*operands)) is not None:
        fix = "pass plain tensors; gather a sharded weight (`weight.full_tensor()`)"
    elif (wrong := untraceable()) is not None:
        fix = "call it outside of that"
    elif (wrong := objective.wrong()) is not None:
        fix = f"pass what help(veomni_hook.{caller}) describes"
    elif weight.ndim != 2 or hidden_states.shape[-1:] != weight.shape[1:]:
        wrong = f"hidden states {[*hidden_states.shape]} and weight {rows} do not match"
        fix = "pass hidden states [..., hidden] and the weight of the head, [vocab, hidden]"
    elif bias is not None and bias.shape != weight.shape[:1]:
        wrong = f"bias {[*bias.shape]} and weight {rows} do not match"
        fix = f"pass a bias of the shape {rows[:1]}, one number for each token of the vocabulary"
    elif target.dtype is not torch.int64 or target.shape != hidden_states.shape[:-1]:
        wrong = f"the target is {target.dtype} {[*target.shape]}, not one int64 for each position"
        fix = f"pass a target of the shape {positions} and dtype torch.int64; it is not shifted"
    elif objective.teacher is not None and (wrong := objective.teacher.wrong(target.shape)) is not None:
        fix = f"pass tensors of the shape {positions} and one dimension more, for the tokens"
    if wrong is not None:
        raise KernelError(wrong, where=caller, fix=fix or "")
    return hidden_states.reshape(-1, weight.shape[1]), weight, bias, target.reshape(-1)


def _module(name: str | None, call: _Operands, objective: Objective, wanted: Wanted) -> ModuleType:
    kind = call[0].device.type
    if torch.compiler.is_compiling():
        traced_module = _traced(kind, name)
    else:
        traced_module = decided((_OP, name), lambda: _ordered(kind, name, STATE.epoch, registry.version))
    reasons = []
    for module in traced_module:
        reason = module.unable(call[0], call[1], objective, wanted)
        if reason is None:
            return module
        reasons.append(f"{module.__name__.rpartition('.')[2]}: {reason}")
    raise KernelError(
        "; ".join(reasons) or f"no backend runs on {kind}",
        where=_OP,
        fix=f"choose another backend: {', '.join(_BACKENDS)}",
    )


def _traced(kind: str, name: str | None) -> tuple[ModuleType, ...]:
    """Choose without the registry, which a tracer cannot follow: the named backend or the device's best."""
    # A backend is imported on first use: triton and torch_npu need not be installed.
    from veomni_hook.kernels.linear_cross_entropy import reference
    from veomni_hook.kernels.linear_cross_entropy import torch as chunked

    if name == "triton" or (name is None and kind == "cuda"):
        from veomni_hook.kernels.linear_cross_entropy import triton

        return (triton,)
    if name == "npu" or (name is None and kind == "npu"):
        from veomni_hook.kernels.linear_cross_entropy import npu

        return (npu,)
    return (reference,) if name == REFERENCE else (chunked,)


@lru_cache(maxsize=32)
def _ordered(kind: str, name: str | None, epoch: int, version: int) -> tuple[ModuleType, ...]:
    """Return candidate modules for device type ``kind``; ``epoch`` and ``version`` identify the settings."""
    from importlib import import_module

    if name is not None and name not in _BACKENDS:
        raise KernelError(
            f"there is no backend {name!r}", where=_OP, fix=f"choose from: {', '.join(_BACKENDS)}"
        )
    wanted = name or STATE.effective.backend(_OP)
    backend = REFERENCE if wanted == EAGER else wanted
    choice = Choice(ops={_OP: backend}, invariant=STATE.choice.invariant)
    selection = select(_OP, _VARIANT, choice, system_of(kind)).checked(_OP)
    package = __name__.rpartition(".")[0]
    names = [kernel.backend for kernel in selection.candidates if kernel.backend in _BACKENDS]
    return tuple(import_module(f"{package}.{name}") for name in names)

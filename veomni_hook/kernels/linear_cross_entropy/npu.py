"""Linear cross-entropy over chunks of rows: `torch`'s chunks and products, ``npu_cross_entropy_loss``
between them.

The operator computes losses and log-probabilities from logits; its backward computes the logits' gradient.
It is used for plain losses: no transform of logits, smoothing, z-loss or entropy; `rowwise` computes the
others. It can only ignore targets below the number of classes, so ignored rows get target 0 and a gradient
of 0.
Float32: logits, losses and gradients of a slice of rows, and what `torch` lists. Mutates: the chunk's logits,
which its gradient overwrites.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from veomni_hook.kernels.linear_cross_entropy import autograd, causal_lm, rowwise
from veomni_hook.kernels.linear_cross_entropy.autograd import Form
from veomni_hook.kernels.linear_cross_entropy.objective import Objective, Teacher, Wanted
from veomni_hook.kernels.linear_cross_entropy.rowwise import Rows
from veomni_hook.kernels.linear_cross_entropy.torch import chunked
from veomni_hook.kernels.shared import ascend
from veomni_hook.kernels.shared.operators import operator

__all__ = [
    "causal_lm_output",
    "loss_and_statistics",
    "refuses",
    "token_statistics",
    "unable",
]

# The operator's maximum number of rows.
_MOST_ROWS = 200_000


@operator(lambda logits, target: (logits.new_empty(target.shape), logits.new_empty(logits.shape)))
def _npu_cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    losses, log_probs, _, _ = ascend.call("npu_cross_entropy_loss", logits, target, reduction="none")
    return losses, log_probs


@operator(lambda dlosses, log_probs, target: log_probs.new_empty(log_probs.shape))
def _npu_cross_entropy_backward(dlosses: Tensor, log_probs: Tensor, target: Tensor) -> Tensor:
    dlogits: Tensor = ascend.call(
        "npu_cross_entropy_loss_backward", dlosses, log_probs, target, reduction="none"
    )
    return dlogits


def _plain(form: Form) -> bool:
    """Whether the operator can compute the loss of ``form``."""
    return (
        form.softcap is None
        and form.factor == 1
        and not form.label_smoothing
        and not form.z_loss
        and not form.entropy
        and not form.distillation
        and not form.share
    )


def _loss(
    logits: Tensor, target: Tensor, weights: Tensor, scale: Tensor | float, form: Form, statistics: Rows,
    teacher: Teacher | None = None, *, gradient: bool,
) -> None:  # fmt: skip
    """`rowwise.loss`, by the operator if it can compute this loss."""
    if not _plain(form):
        rowwise.loss(logits, target, weights, scale, form, statistics, teacher, gradient=gradient)
        return
    for rows in rowwise.slices(logits, _MOST_ROWS):
        here = statistics.part(rows)
        counts = target[rows] != form.ignore_index
        goal = target[rows].where(counts, 0)
        z = logits[rows].float()
        losses, log_probs = _npu_cross_entropy(z.contiguous(), goal)
        here.losses.copy_((weights[rows] * losses).where(counts, 0))
        here.log_probs.copy_((-losses).where(counts, 0))
        if form.predictions:
            here.predictions.copy_(z.argmax(-1).where(counts, form.ignore_index))
        if gradient:
            of_rows = (weights[rows] * scale).where(counts, 0)
            logits[rows].copy_(_npu_cross_entropy_backward(of_rows, log_probs, goal))


_BACKEND = chunked(_loss)
#: Operands and results are those of `reference.loss_and_statistics` and `reference.token_statistics`.
loss_and_statistics = partial(autograd.loss_and_statistics, _BACKEND)
token_statistics = partial(autograd.token_statistics, _BACKEND)
#: Returns a language model's loss computed here.
causal_lm_output = partial(causal_lm.fused_output, loss_and_statistics, token_statistics)


def unable(x: Tensor, weight: Tensor, objective: Objective, wanted: Wanted) -> str | None:
    """Return why this cannot be computed here, or None."""
    dtype = autograd.compute_dtype(x)
    if dtype not in ascend.DTYPES:
        return f"logits have dtype {dtype}"
    return None if weight.numel() else "the weight is empty"


def refuses(model: object, *operands: Any) -> str | None:
    """Return why the loss of this call cannot be computed here, beside `causal_lm.refuses`, or None."""
    dtype = autograd.compute_dtype(operands[0])
    return None if dtype in ascend.DTYPES else f"logits have dtype {dtype}"

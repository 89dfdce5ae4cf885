"""Linear cross-entropy over chunks of rows: three cuBLAS products and one Triton launch per chunk.

Forward:  the loss of `objective.Objective`. Logits of a chunk go into one buffer in the dtype of x; one
          program per row reads them twice, in float32, and overwrites them with their gradient.
Backward: computed in the forward: dx = d @ weight, dweight = sum of d.T @ x over chunks, dbias = sum of d,
          with
          d = t' w / items * ((1 + 2 z_loss lse) softmax(z) - (1 - e) onehot(target) - e / vocab)
          Backward itself applies only the incoming factor, which is free if it is 1.
Shapes: x [rows, hidden], weight [vocab, hidden], bias [vocab], target [rows] int64; loss float32, [].
With a teacher, the losses of a chunk are PyTorch's, between two launches: `chosen_tokens`.
Float32: all steps between a row's logits and its gradient, sums over rows, dbias, and dweight if requested.
Mutates: nothing. Ignored rows go through the products, too: counting them would synchronise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veomni_hook.kernels.linear_cross_entropy import (
    autograd,
    causal_lm,
    chosen_tokens,
    device,
)
from veomni_hook.kernels.linear_cross_entropy.autograd import Backend, Form, Found, Gradients, Needed
from veomni_hook.kernels.linear_cross_entropy.chosen_tokens import Incoming
from veomni_hook.kernels.linear_cross_entropy.chunks import Head, Sums, chunks, divisor, precision
from veomni_hook.kernels.linear_cross_entropy.objective import (
    Objective,
    Teacher,
    TokenStatistics,
    Transform,
    Wanted,
)
from veomni_hook.kernels.selection.binding import wanted_by
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.shared.launch import power
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.sizes import SIZES

__all__ = [
    "causal_lm_output",
    "loss_and_statistics",
    "refuses",
    "token_statistics",
    "unable",
]

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
# Rows of a chunk: with fewer, the products with the weight's gradient are memory-bound. A chunk may have more
# while its logits take less than CHUNK_BYTES. If the weight is trained, and `SIZES` are not the least, also
# while they take less than the weight (up to LEAST_ROWS), or than the weight without CHUNK_ROWS columns; than
# the whole weight if its gradient is summed in float32: the converted gradient needs as much later. Multiples
# of 1,024 suit the products' tiles. On an H200, 8,192 rows, bfloat16, in ms:
#                     products   1,024   1,280   1,536   2,048   3,072   4,096
#   2,048 x 151,936       21.7    24.9    24.4    24.4    23.9    23.9    23.8
#   2,880 x 201,088       42.6    47.9    46.7    45.6    44.6    44.8    44.1
#   4,096 x 151,936       44.3    48.6    47.7    47.4    47.3    46.1    46.4
#   5,120 x 128,256       47.1    51.8    52.7    48.8    47.6    48.0    47.8
CHUNK_ROWS, LEAST_ROWS, CHUNK_BYTES = 1024, 2048, 1 << 28
#: Rows in a tile of the matrix products.
TILE = 128
# Elements of a row that a program holds at once, half of them if a row has fewer than six times as many, and
# its warps. On an H200, 8,192 rows of 32,000 take 281 us so and not 447, of 49,152 456 and not 538.
BLOCK, BLOCKS, ELEMENTS_A_WARP, STAGES = 16384, 6, 512, 1
# Bytes that a thread loads at once.
_LOAD = 16
_SCALE_BLOCK, _SCALE_PROGRAMS = 8192, 1056


def chunk_rows(
    rows: int, hidden: int, vocab: int, element: int, *, trained: bool = True, converted: bool = False
) -> int:
    """Return the rows of each chunk but the last.

    ``trained``: the weight has a gradient; ``converted``: it is summed in float32 and returned in a narrower
    dtype.
    """
    share = hidden if converted else max(min(hidden, LEAST_ROWS), hidden - CHUNK_ROWS)
    share = share if trained and not SIZES.least else 0
    most = max(CHUNK_ROWS, share, CHUNK_BYTES // (vocab * element)) // CHUNK_ROWS * CHUNK_ROWS
    return min(most, max(1, -(-rows // TILE)) * TILE)


def _size(x: Tensor, weight: Tensor, precisions: tuple[torch.dtype, torch.dtype], *, trained: bool) -> int:
    (total, result), (vocab, hidden) = precisions, weight.shape
    converted = total is torch.float32 and result.itemsize < total.itemsize
    return chunk_rows(x.shape[0], hidden, vocab, x.element_size(), trained=trained, converted=converted)


def _filled(x: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Replace unneeded gradients by empty tensors: an operator can return only tensors."""
    to_x, to_weight, to_bias = (x.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return to_x, to_weight, to_bias


class _Walk(NamedTuple):
    """How the kernels of one call iterate over a row of logits and transform it."""

    vocab: int
    lanes: int
    group: int
    capped: bool
    warps: int
    cap: float

    @classmethod
    def of(cls, weight: Tensor, softcap: float | None) -> _Walk:
        vocab = weight.shape[0]
        block = min(BLOCK if vocab >= BLOCKS * BLOCK else BLOCK // 2, max(128, power(vocab)))
        warps = max(4, min(32, block // ELEMENTS_A_WARP))
        group = _LOAD // weight.element_size()
        cap = 1.0 if softcap is None else softcap
        return cls(vocab, block // group, group, softcap is not None, warps, cap)


def _row_results(x: Tensor, *, entropy: bool, predictions: bool) -> tuple[Tensor, Tensor]:
    """Allocate the optional statistics of rows."""
    rows = x.shape[0]
    entropies = x.new_empty(rows if entropy else 0, dtype=torch.float32)
    return entropies, x.new_empty(rows if predictions else 0, dtype=torch.int64)


def _like_gradients(x: Tensor, weight: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """Like the gradients of x, weight and bias, without values, for tracers; ``call``: an operator's."""
    *_, result, (to_x, to_weight, to_bias) = call
    return (
        x.new_empty(x.shape if to_x else 0),
        weight.new_empty(weight.shape, dtype=result) if to_weight else x.new_empty(0),
        x.new_empty(weight.shape[0], dtype=torch.float32) if to_bias else x.new_empty(0),
    )


def _like_loss(x: Tensor, weight: Tensor, *call: Any) -> tuple[Tensor, ...]:
    num_items, (entropy, predictions) = call[4], call[-5:-3]
    loss = x.new_empty(() if num_items is None else num_items.shape, dtype=torch.float32)
    inverse = x.new_empty((), dtype=torch.float32)
    log_probs = x.new_empty(x.shape[0], dtype=torch.float32)
    statistics = log_probs, *_row_results(x, entropy=entropy, predictions=predictions)
    return loss, inverse, *_like_gradients(x, weight, *call), *statistics


def _like_statistics(x: Tensor, weight: Tensor, *call: Any) -> tuple[Tensor, ...]:
    *_, ids, _, _, _, entropy, predictions = call
    log_probs, lse = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    at = lse.new_empty(0 if ids is None else ids.shape)
    return log_probs, *_row_results(x, entropy=entropy, predictions=predictions), lse, at


@operator(_like_loss)
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor | None,
    teachers: Tensor | None,
    num_items: Tensor | None,
    loss_weights: Tensor | None,
    ignore_index: int,
    factor: float,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    clamp: float | None,
    share: float,
    entropy: bool,
    predictions: bool,
    total: torch.dtype,
    result: torch.dtype,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the factor of its gradients, these, and statistics.

    With a teacher's ``ids`` and ``teachers``, its log-probabilities, there is no label smoothing.
    """
    target = target.contiguous()
    losses, log_probs = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    entropies, tokens = _row_results(x, entropy=entropy, predictions=predictions)
    items, inverse = divisor(target, num_items, loss_weights, ignore_index)
    teacher = None if ids is None or teachers is None else Teacher(ids, teachers, clamp)
    if teacher is None:
        weights = losses if loss_weights is None else loss_weights.contiguous()
    else:
        counts = target != ignore_index
        weights = counts.float() if loss_weights is None else loss_weights.where(counts, 0)
        of_rows = weights if x.dtype is torch.float16 else weights * inverse
        lses = torch.empty_like(losses)
        transform = Transform(torch.float32, factor, None, softcap)
    head = Head.of(weight, bias)
    sums = Sums(x, head, Needed(*needed), (total, result))
    walk = _Walk.of(weight, softcap)
    for chunk in chunks(x, head, _size(x, weight, (total, result), trained=sums.needed.weight)):
        part, logits = chunk.rows, chunk.logits
        if teacher is None:
            device.loss[(logits.shape[0],)](
                logits, logits.stride(0), target[part], weights[part], inverse, losses[part],
                log_probs[part], entropies[part], tokens[part], ignore_index, factor, walk.cap,
                label_smoothing, z_loss, *walk[:4], loss_weights is not None, label_smoothing != 0, entropy,
                predictions, any(needed), x.dtype is not torch.float16, STAGES, num_warps=walk.warps,
            )  # fmt: skip
        else:
            _launch_statistics(
                logits, part, target, (lses, log_probs, entropies, tokens), ignore_index, factor, walk,
                entropy=entropy, predictions=predictions,
            )  # fmt: skip
            lse, own = lses[part], teacher.of_rows(part)
            at = chosen_tokens.log_probs(logits, own.topk_ids, lse, counts[part], transform)
            of_teacher = own.divergence(at, counts[part]).losses
            of_label = z_loss * lse.square() - log_probs[part]
            losses[part] = weights[part] * of_label.lerp(of_teacher, share).where(counts[part], 0)
            if any(needed):
                to_log_probs = (share - 1) * of_rows[part]
                to_at = own.slopes(at) * (share * of_rows[part])[:, None]
                others = to_at.sum(-1) + (2 * z_loss) * lse * to_log_probs
                _launch_gradient(
                    logits, target[part], lse, (None, own.topk_ids, at),
                    Incoming(to_log_probs, None, to_at, others), ignore_index, transform, walk,
                )  # fmt: skip
        sums.add(chunk)
        # Free the buffer before the weight's gradient is converted.
        del chunk, logits
    return losses.sum() / items, inverse, *_filled(x, sums.results()), log_probs, entropies, tokens


@operator(_like_statistics)
def _token_statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor | None,
    ignore_index: int,
    factor: float,
    softcap: float | None,
    entropy: bool,
    predictions: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    target = target.contiguous()
    lses, log_probs = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    at = lses.new_empty(0 if ids is None else ids.shape)
    entropies, tokens = _row_results(x, entropy=entropy, predictions=predictions)
    walk = _Walk.of(weight, softcap)
    transform = Transform(torch.float32, factor, None, softcap)
    for part, logits, _ in chunks(
        x, Head.of(weight, bias), _size(x, weight, (x.dtype, x.dtype), trained=False)
    ):
        _launch_statistics(
            logits, part, target, (lses, log_probs, entropies, tokens), ignore_index, factor, walk,
            entropy=entropy, predictions=predictions,
        )  # fmt: skip
        if ids is not None:
            counts = target[part] != ignore_index
            at[part] = chosen_tokens.log_probs(logits, ids[part], lses[part], counts, transform)
    return log_probs, entropies, tokens, lses, at


@operator(_like_gradients)
def _token_statistics_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor | None,
    lse: Tensor,
    entropy: Tensor | None,
    at: Tensor | None,
    to_log_probs: Tensor | None,
    to_entropy: Tensor | None,
    to_at: Tensor | None,
    ignore_index: int,
    factor: float,
    softcap: float | None,
    total: torch.dtype,
    result: torch.dtype,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    target = target.contiguous()
    of_rows = [None if tensor is None else tensor.contiguous() for tensor in (to_log_probs, to_entropy)]
    others = None
    if to_at is not None:
        to_at = to_at.where((target != ignore_index)[:, None], 0)
        others = to_at.sum(-1)
    numbers = [entropy, ids, at, *of_rows, to_at, others]
    head = Head.of(weight, bias)
    sums = Sums(x, head, Needed(*needed), (total, result))
    walk = _Walk.of(weight, softcap)
    transform = Transform(torch.float32, factor, None, softcap)
    for chunk in chunks(x, head, _size(x, weight, (total, result), trained=sums.needed.weight)):
        part, logits = chunk.rows, chunk.logits
        own = [None if tensor is None else tensor[part] for tensor in numbers]
        of_forward, incoming = own[:3], Incoming(*own[3:])
        _launch_gradient(logits, target[part], lse[part], of_forward, incoming, ignore_index, transform, walk)
        sums.add(chunk)
        del chunk, logits
    return _filled(x, sums.results())


def _launch_statistics(
    logits: Tensor,
    part: slice,
    target: Tensor,
    results: tuple[Tensor, ...],
    ignore_index: int,
    factor: float,
    walk: _Walk,
    *,
    entropy: bool,
    predictions: bool,
) -> None:
    """Fill ``results`` of the rows ``part``, whose logits are ``logits``."""
    device.statistics[(logits.shape[0],)](
        logits, logits.stride(0), target[part], *(result[part] for result in results), ignore_index, factor,
        walk.cap, *walk[:4], entropy, predictions, STAGES, num_warps=walk.warps,
    )  # fmt: skip


def _launch_gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    of_forward: Sequence[Tensor | None],
    incoming: Incoming,
    ignore_index: int,
    transform: Transform,
    walk: _Walk,
) -> None:
    """Overwrite a chunk's logits with their gradient.

    ``of_forward`` are entropies, ids of chosen tokens and their log-probabilities.
    """
    entropy, ids, at = of_forward
    of_rows = entropy, incoming.log_probs, incoming.entropy, incoming.others
    device.gradient[(logits.shape[0],)](
        logits, logits.stride(0), target, lse, *(lse if tensor is None else tensor for tensor in of_rows),
        ignore_index, transform.factor, walk.cap, *walk[:4],
        *(tensor is not None for tensor in of_rows[1:]), STAGES, num_warps=walk.warps,
    )  # fmt: skip
    if ids is not None and at is not None and incoming.at is not None:
        counts = target != ignore_index
        chosen_tokens.overwrite(logits, ids, at, target, lse, entropy, counts, incoming, transform)


@operator(lambda x, factor: None, "scale_(Tensor(a!) x, Tensor factor) -> ()")
def _scale(x: Tensor, factor: Tensor) -> None:
    if x.numel():
        programs = min(_SCALE_PROGRAMS, -(-x.numel() // _SCALE_BLOCK))
        device.scale[(programs,)](x, factor, x.numel(), _SCALE_BLOCK, num_warps=8)


def _loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    num_items: Tensor | None,
    loss_weights: Tensor | None,
    teacher: Teacher | None,
    form: Form,
    kept: torch.dtype,
    needed: Needed,
) -> Found:
    end = (form.entropy, form.predictions, *precision(x.dtype, kept, in_float32=form.in_float32))
    of_teacher = (None, None) if teacher is None else teacher[:2]
    found = _linear_cross_entropy(
        x, weight, bias, target, *of_teacher, num_items, loss_weights, *form[:5], form.log_prob_min_clamp,
        form.share, *end, list(needed),
    )  # fmt: skip
    loss, inverse, *gradients, log_probs, entropy, predictions = found
    # Scaled gradients may underflow in float16.
    late = inverse if x.dtype is torch.float16 else None
    return Found(loss, _needed(gradients, needed), late, _wanted(form, log_probs, entropy, predictions))


def _statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ids: Tensor | None, form: Form
) -> tuple[TokenStatistics, Tensor, Tensor | None]:
    *statistics, lse, at = _token_statistics(
        x, weight, bias, target, ids, *form[:3], form.entropy, form.predictions
    )
    return _wanted(form, *statistics), lse, None if ids is None else at


def _gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor | None,
    form: Form,
    *call: Any,
) -> Gradients:
    *rows, kept, needed = call
    total, result = precision(x.dtype, kept, in_float32=form.in_float32)
    slopes = _token_statistics_backward(
        x, weight, bias, target, ids, *rows, *form[:3], total, result, list(needed)
    )
    return _needed(slopes, needed)


def _needed(gradients: Sequence[Tensor], needed: Needed) -> Gradients:
    return Gradients(*(tensor if wanted else None for tensor, wanted in zip(gradients, needed, strict=True)))


def _wanted(form: Form, *statistics: Tensor) -> TokenStatistics:
    asked = form.log_probs, form.entropy, form.predictions
    return TokenStatistics(
        *(tensor if wanted else None for tensor, wanted in zip(statistics, asked, strict=True))
    )


_BACKEND = Backend(_loss, _statistics, _gradients, _scale)
#: Operands and results are those of `reference.loss_and_statistics` and `reference.token_statistics`.
loss_and_statistics = partial(autograd.loss_and_statistics, _BACKEND)
token_statistics = partial(autograd.token_statistics, _BACKEND)
#: Returns a language model's loss computed here.
causal_lm_output = partial(causal_lm.fused_output, loss_and_statistics, token_statistics)


def unable(x: Tensor, weight: Tensor, objective: Objective, wanted: Wanted) -> str | None:
    """Return why this cannot be computed here, or None."""
    dtype = autograd.compute_dtype(x)
    if dtype not in _DTYPES:
        return f"logits have dtype {dtype}"
    return None if weight.numel() else "the weight is empty"


def refuses(model: object, *operands: Any) -> str | None:
    """Return why the loss of this call cannot be computed here, beside `causal_lm.refuses`, or None."""
    dtype = autograd.compute_dtype(operands[0])
    reason = None if dtype in _DTYPES else f"logits have dtype {dtype}"
    # With auto, the torch backend is tried next.
    return (
        reason
        if wanted_by(model, "linear_cross_entropy") == AUTO
        else causal_lm.settled(model, reason, *operands)
    )

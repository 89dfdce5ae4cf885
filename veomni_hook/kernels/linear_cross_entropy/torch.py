"""Linear cross-entropy over chunks of rows in plain PyTorch, with its gradients computed in the forward.

`objective` has the formulas, `rowwise` the steps between the products. Saved: the gradients, and what a
second derivative needs (`autograd`). Float32: transforms, softmax, losses, dbias, and dweight while chunks
are added to it. Ignored rows are skipped on a CPU. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.linear_cross_entropy import autograd, causal_lm, losses, rowwise
from veomni_hook.kernels.linear_cross_entropy.autograd import Backend, Form, Found, Gradients, Needed
from veomni_hook.kernels.linear_cross_entropy.chunks import (
    ALIGNED,
    Chunk,
    Head,
    Sums,
    chunks,
    divisor,
    precision,
)
from veomni_hook.kernels.linear_cross_entropy.objective import Objective, Teacher, TokenStatistics, Wanted
from veomni_hook.kernels.linear_cross_entropy.options import active, token_outputs_of

__all__ = [
    "causal_lm_output",
    "chunked",
    "loses",
    "loss_and_statistics",
    "token_statistics",
    "unable",
]

# Forward and backward on 2 cores, vocabularies 384 to 32,000: equal at 4 million logits, slower below, 1.05
# to 1.3 times as fast from 16 million (64 MiB in float32) on.
AUTO_LOGITS = 1 << 23

# A chunk has at least this many rows (fewer slow down the matrix products: 128 rows cost 15 % at a vocabulary
# of 151,936), or as many rows as make this number of logits (16 MiB in float32), if that is more.
CHUNK_ROWS = 256
CHUNK_LOGITS = 1 << 22
# On a GPU each chunk reads and writes all of the weight's gradient. H200, 8,192 x 4,096 x 151,936, bfloat16:
# 1 << 25 takes 111 ms and 2.3 GiB, 1 << 27 73 ms and 2.4, 1 << 28 67 ms and 3.7, 1 << 29 65 ms and 6.2.
CHUNK_LOGITS_GPU = 1 << 28
# Skipping rows copies the rest: not worth it for only the last position of each sequence.
SELECT_FROM = 1 / 8


OfRows = Callable[..., None]


class _Selected(NamedTuple):
    """The rows to compute: those at ``chosen`` (None: all)."""

    x: torch.Tensor
    target: torch.Tensor
    chosen: torch.Tensor | None

    @classmethod
    def select(cls, x: torch.Tensor, target: torch.Tensor, form: Form, vocab: int) -> _Selected:
        """Select the rows that are not ignored, if skipping the others is worthwhile; else these are 0.

        What an ignored row holds, as NaN of padding, reaches no gradient: it would be multiplied by 0.
        """
        counts = target != form.ignore_index
        # On other devices counting them would synchronise; a tracer cannot know the count.
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            if (counts & ((target < 0) | (target >= vocab))).any():
                raise IndexError(
                    f"a target is neither a token (0 to {vocab - 1}) nor the ignore_index {form.ignore_index}"
                )
            index = counts.nonzero().squeeze(1)
            ignored = target.numel() - index.numel()
            if not ignored:
                return cls(x, target, None)
            if ignored >= SELECT_FROM * target.numel():
                return cls(x[index], target[index], index)
        return cls(x.where(counts[:, None], 0), target, None)

    def of(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Return what ``of_rows`` holds of the chosen rows."""
        return of_rows if self.chosen is None else of_rows[self.chosen]

    def of_all(self, rows: torch.Tensor, number: int, filled: float = 0) -> torch.Tensor:
        """Scatter ``rows`` into ``number`` rows; the others are ``filled``."""
        if self.chosen is None:
            return rows
        return rows.new_full((number, *rows.shape[1:]), filled).index_copy_(0, self.chosen, rows)


def _size(x: torch.Tensor, weight: torch.Tensor) -> int:
    logits = CHUNK_LOGITS if x.device.type == "cpu" else CHUNK_LOGITS_GPU
    return max(CHUNK_ROWS, logits // max(1, weight.shape[0]))


def _chunks(x: torch.Tensor, head: Head) -> Iterator[Chunk]:
    # As of `Head.of`: dynamo cannot write to rows with padding between them.
    close = x.device.type == "cpu" or torch.compiler.is_compiling()
    return chunks(x, head, _size(x, head.weight), 1 if close else ALIGNED)


def _precision(
    x: torch.Tensor, weight: torch.Tensor, kept: torch.dtype, form: Form
) -> tuple[torch.dtype, torch.dtype]:
    # A large bfloat16 sum loses the contribution of small chunks.
    return precision(x.dtype, kept, in_float32=form.in_float32 or x.shape[0] > _size(x, weight))


def _loss(
    of_rows: OfRows,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    num_items: torch.Tensor | None,
    loss_weights: torch.Tensor | None,
    teacher: Teacher | None,
    form: Form,
    kept: torch.dtype,
    needed: Needed,
) -> Found:
    items, inverse = divisor(target, num_items, loss_weights, form.ignore_index)
    rows = x.shape[0]
    selected = _Selected.select(x, target, form, weight.shape[0])
    x, target, _ = selected
    weights = torch.ones_like(target, dtype=torch.float32)
    weights = weights if loss_weights is None else selected.of(loss_weights)
    weights = weights.where(target != form.ignore_index, 0)
    if teacher is not None:
        ids, log_probs = (selected.of(tensor) for tensor in teacher[:2])
        teacher = teacher._replace(topk_ids=ids, topk_log_probs=log_probs)
    # Scaled gradients may underflow in float16.
    late = x.dtype is torch.float16
    head = Head.of(weight, bias)
    sums = Sums(x, head, needed, _precision(x, weight, kept, form))
    rows_ = rowwise.Rows.empty(x, form, None if teacher is None else teacher.topk_ids)
    for chunk in _chunks(x, head):
        part, logits = chunk.rows, chunk.logits
        of_rows(
            logits, target[part], weights[part], 1.0 if late else inverse, form, rows_.part(part),
            None if teacher is None else teacher.of_rows(part), gradient=any(needed),
        )  # fmt: skip
        sums.add(chunk)
        del chunk, logits
    of_x, of_weight, of_bias = sums.results()
    of_x = None if of_x is None else selected.of_all(of_x, rows)
    gradients = Gradients(of_x, of_weight, of_bias)
    statistics = _statistics_of(rows_, selected, rows, form)
    return Found(rows_.losses.sum() / items, gradients, inverse if late else None, statistics)


def _statistics(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ids: torch.Tensor | None,
    form: Form,
) -> tuple[TokenStatistics, torch.Tensor, torch.Tensor | None]:
    rows = x.shape[0]
    selected = _Selected.select(x, target, form, weight.shape[0])
    x, target, _ = selected
    found = rowwise.Rows.empty(x, form, None if ids is None else selected.of(ids))
    ones = torch.ones_like(target, dtype=torch.float32)
    for part, logits, _ in _chunks(x, Head.of(weight, bias)):
        rowwise.loss(logits, target[part], ones[part], 1.0, form, found.part(part), gradient=False)
    at = None if ids is None else selected.of_all(found.at, rows)
    return _statistics_of(found, selected, rows, form), selected.of_all(found.lse, rows), at


def _gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ids: torch.Tensor | None,
    form: Form,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    at: torch.Tensor | None,
    to_log_probs: torch.Tensor | None,
    to_entropy: torch.Tensor | None,
    to_at: torch.Tensor | None,
    kept: torch.dtype,
    needed: Needed,
) -> Gradients:
    rows = x.shape[0]
    selected = _Selected.select(x, target, form, weight.shape[0])
    x, target, _ = selected
    every = lse, entropy, to_log_probs, to_entropy, ids, to_at
    numbers = [None if number is None else selected.of(number) for number in every]
    head = Head.of(weight, bias)
    sums = Sums(x, head, needed, _precision(x, weight, kept, form))
    for chunk in _chunks(x, head):
        part, logits = chunk.rows, chunk.logits
        of_rows = [None if number is None else number[part] for number in numbers]
        rowwise.overwrite(logits, target[part], form, *of_rows)  # type: ignore[arg-type]
        sums.add(chunk)
        del chunk, logits
    of_x, of_weight, of_bias = sums.results()
    return Gradients(None if of_x is None else selected.of_all(of_x, rows), of_weight, of_bias)


def _statistics_of(statistics: rowwise.Rows, selected: _Selected, rows: int, form: Form) -> TokenStatistics:
    return TokenStatistics(
        selected.of_all(statistics.log_probs, rows) if form.log_probs else None,
        selected.of_all(statistics.entropy, rows) if form.entropy else None,
        selected.of_all(statistics.predictions, rows, form.ignore_index) if form.predictions else None,
    )


def _scale(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    # Reading a number is free only on a CPU.
    if factor.device.type != "cpu" or factor.item() != 1:
        gradient.mul_(factor)


def chunked(of_rows: OfRows) -> Backend:
    """Return a backend that computes each chunk with ``of_rows``, called like `rowwise.loss`."""
    return Backend(partial(_loss, of_rows), _statistics, _gradients, _scale)


_BACKEND = chunked(rowwise.loss)
#: Operands and results are those of `reference.loss_and_statistics` and `reference.token_statistics`.
loss_and_statistics = partial(autograd.loss_and_statistics, _BACKEND)
token_statistics = partial(autograd.token_statistics, _BACKEND)
#: Returns a language model's loss computed here.
causal_lm_output = partial(causal_lm.fused_output, loss_and_statistics, token_statistics)


def unable(x: torch.Tensor, weight: torch.Tensor, objective: Objective, wanted: Wanted) -> str | None:
    """Return why this cannot be computed here, or None."""
    return None if autograd.compute_dtype(x).is_floating_point else f"hidden states have dtype {x.dtype}"


def loses(
    owner: Any, hidden_states: torch.Tensor, head: object, labels: object, vocab_size: int, *rest: object
) -> str | None:
    """Return why upstream was measured to be faster here, or None."""
    asked = token_outputs_of(owner, hidden_states, head, labels, vocab_size, *rest)
    if asked or active() is not None or losses.is_veomnis(getattr(owner, "loss_function", None)):
        return None  # only a fused loss supports them
    if hidden_states.device.type != "cpu":
        # H200, bfloat16, 8,192 to 32,768 rows: 0.84 to 0.96 of upstream's speed, a third to a fifteenth of
        # its memory.
        return "on a GPU it saves memory but takes longer; choose torch by name to use it"
    if hidden_states.shape[:-1].numel() * vocab_size < AUTO_LOGITS:
        return "with so few logits, upstream's code is as fast"
    return None

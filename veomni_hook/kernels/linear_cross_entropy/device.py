"""Device code of the linear cross-entropy; `veomni_hook.kernels.linear_cross_entropy.triton` launches it."""

import triton
import triton.language as tl

__all__ = ["forward", "gradient", "scale"]


@triton.jit
def _transformed(raw, factor, cap, CAPPED: tl.constexpr):
    z = raw.to(tl.float32) * factor
    if CAPPED:
        # tanh from exp: the interpreter has no tanh.
        z = cap * (1.0 - 2.0 / (1.0 + tl.exp(z * (2.0 / cap))))
    return z


@triton.jit
def _overwrite(
    here, goal, lse, of_probability, of_product, of_goal, of_all, factor, cap,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Overwrite a row of logits with its gradient, in one pass.

    p * (of_probability + of_product * z) + of_all, plus of_goal at the goal; times the transform's slope.
    """
    for begin in tl.range(0, VOCAB, BLOCK, num_stages=STAGES):
        column = begin + tl.arange(0, BLOCK)
        inside = column < VOCAB
        z = _transformed(tl.load(here + column, mask=inside, other=0.0), factor, cap, CAPPED)
        p = tl.exp(z - lse)
        g = p * of_probability + of_all
        if PRODUCT:
            g += p * of_product * tl.where(p > 0, z, 0.0)
        g = tl.where(column == goal, g + of_goal, g) * factor
        if CAPPED:
            g = g * (1.0 - (z / cap) * (z / cap))
        tl.store(here + column, g.to(here.dtype.element_ty), mask=inside)


@triton.jit
def _clear(here, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    for begin in tl.range(0, VOCAB, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        tl.store(here + column, tl.zeros([BLOCK], here.dtype.element_ty), mask=column < VOCAB)


@triton.jit
def _summary(
    here, factor, cap,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    ENTROPY: tl.constexpr, PREDICTIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row's logsumexp, mean, entropy and first highest column, in one pass; 0 if not requested.

    Each lane keeps its own maximum and sums: one exponential per element, no reduction until the end.
    """
    # Finite, so that differences in lanes without elements are not NaN.
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(0, VOCAB, BLOCK, num_stages=STAGES):
        column = begin + tl.arange(0, BLOCK)
        inside = column < VOCAB
        z = _transformed(tl.load(here + column, mask=inside, other=0.0), factor, cap, CAPPED)
        if SMOOTHED:
            plain += tl.where(inside, z, 0.0)
        z = tl.where(inside, z, float("-inf"))
        gap = z - top
        power = tl.exp(-tl.abs(gap))
        higher = gap > 0
        if ENTROPY:
            more = moment + power * tl.where(power > 0, gap, 0.0)
            moment = tl.where(higher, power * (moment - tl.where(higher, gap, 0.0) * total), more)
        total = tl.where(higher, total * power + 1.0, total + power)
        if PREDICTIONS:
            best = tl.where(higher, column, best)
        top = tl.maximum(top, z)
    highest = tl.max(top, axis=0)
    share = tl.exp(top - highest)
    summed = tl.sum(total * share, axis=0)
    lse = highest + tl.log(summed)
    mean = tl.full([], 0.0, tl.float32)
    if SMOOTHED:
        mean = tl.sum(plain, axis=0) / VOCAB
    entropy = tl.full([], 0.0, tl.float32)
    if ENTROPY:
        # sum(p * (z - highest)) <= 0 <= log(summed): nothing cancels.
        entropy = tl.log(summed) - tl.sum(share * (moment + (top - highest) * total), axis=0) / summed
    first = tl.full([], 0, tl.int32)
    if PREDICTIONS:
        first = tl.min(tl.where(top == highest, best, VOCAB), axis=0)
    return lse, mean, entropy, first


@triton.jit
def _keep(
    row, log_probs, entropies, predictions, log_prob, entropy, token,
    ENTROPY: tl.constexpr, PREDICTIONS: tl.constexpr,
):  # fmt: skip
    tl.store(log_probs + row, log_prob)
    if ENTROPY:
        tl.store(entropies + row, entropy)
    if PREDICTIONS:
        tl.store(predictions + row, token.to(tl.int64))


@triton.jit
def forward(
    logits, pitch, target, weights, inverse, losses, lses, log_probs, entropies, predictions,
    ignore_index, factor, cap, smoothing, z_loss,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, WEIGHTED: tl.constexpr,
    LOSS: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, PREDICTIONS: tl.constexpr,
    GRADIENT: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a row's statistics and (``LOSS``) its loss, or else its logsumexp.

    ``GRADIENT``: overwrites the logits with the loss's gradient; ``SCALED``: times ``inverse``.
    """
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * pitch
    goal = tl.load(target + row)
    if goal == ignore_index:
        if LOSS:
            tl.store(losses + row, 0.0)
        else:
            tl.store(lses + row, 0.0)
        _keep(row, log_probs, entropies, predictions, 0.0, 0.0, goal, ENTROPY, PREDICTIONS)
        if GRADIENT:
            _clear(here, VOCAB, BLOCK)
    else:
        known = (goal >= 0) & (goal < VOCAB)
        # Read before anything is overwritten: the reductions in the summary synchronise warps.
        at_goal = tl.load(here + goal, mask=known, other=0.0)
        # An invalid target makes loss and gradient NaN; torch would raise a device-side assertion.
        at_goal = tl.where(known, _transformed(at_goal, factor, cap, CAPPED), float("nan"))
        lse, mean, entropy, first = _summary(
            here, factor, cap, VOCAB, BLOCK, CAPPED, SMOOTHED, ENTROPY, PREDICTIONS, STAGES
        )
        _keep(row, log_probs, entropies, predictions, at_goal - lse, entropy, first, ENTROPY, PREDICTIONS)
        if LOSS:
            weight = 1.0
            if WEIGHTED:
                weight = tl.load(weights + row)
            loss = lse - (1.0 - smoothing) * at_goal - smoothing * mean + z_loss * lse * lse
            tl.store(losses + row, weight * loss)
            if GRADIENT:
                if SCALED:
                    weight = weight * tl.load(inverse)
                of_probability = tl.where(known, weight * (1.0 + 2.0 * z_loss * lse), float("nan"))
                _overwrite(
                    here, goal.to(tl.int32), lse, of_probability, 0.0, weight * (smoothing - 1.0),
                    -weight * smoothing / VOCAB, factor, cap, VOCAB, BLOCK, CAPPED, False, STAGES,
                )  # fmt: skip
        else:
            tl.store(lses + row, lse)


@triton.jit
def gradient(
    logits, pitch, target, lses, entropies, to_log_probs, to_entropies, ignore_index, factor, cap,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, LOG_PROBS: tl.constexpr,
    ENTROPY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Overwrite a row of logits with the gradient of its log-probability and entropy."""
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * pitch
    goal = tl.load(target + row)
    if goal == ignore_index:
        _clear(here, VOCAB, BLOCK)
    else:
        lse = tl.load(lses + row)
        of_goal = 0.0
        of_product = 0.0
        if LOG_PROBS:
            of_goal = tl.load(to_log_probs + row)
        of_probability = -of_goal
        if ENTROPY:
            of_product = -tl.load(to_entropies + row)
            of_probability += of_product * (tl.load(entropies + row) - lse)
        known = (goal >= 0) & (goal < VOCAB)
        of_probability = tl.where(known, of_probability, float("nan"))
        _overwrite(
            here, goal.to(tl.int32), lse, of_probability, of_product, of_goal, 0.0, factor, cap,
            VOCAB, BLOCK, CAPPED, ENTROPY, STAGES,
        )  # fmt: skip


@triton.jit
def scale(x, factor, size, BLOCK: tl.constexpr):
    """Multiply x by the scalar ``factor``; if it is 1, do nothing."""
    by = tl.load(factor)
    if by != 1.0:
        for number in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(size, BLOCK), tl.num_programs(0)):
            place = number * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
            held = tl.load(x + place, mask=place < size)
            tl.store(x + place, (held.to(tl.float32) * by).to(held.dtype), mask=place < size)

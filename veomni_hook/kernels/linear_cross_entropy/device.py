"""Device code of the linear cross-entropy; `veomni_hook.kernels.linear_cross_entropy.triton` launches it.

z = factor * logits, or cap * tanh(factor * logits / cap) if ``CAPPED``; t' is its slope; p = softmax(z);
lse = logsumexp(z); V = VOCAB; e = smoothing; onehot is 1 at the target.

Forward:  `statistics` log_prob = z[target] - lse;  entropy = -sum(p log p);  prediction = argmax(z)
          `loss`       these, and w * ((1 - e) (lse - z[target]) + e (lse - mean(z)) + z_loss lse^2)
Backward: `loss`       d = t' w * inverse * ((1 + 2 z_loss lse) p - (1 - e) onehot - e / V)
          `gradient`   d = t' * (dlog_prob (onehot - p) - dentropy p (log p + entropy))
          `scale`      x * factor
Grid: (rows of the chunk,): a program handles a row of logits, BLOCK columns at a time; `scale` differs.

Shapes: logits [rows, V], 16-bit or float32, are overwritten by their gradient; everything else has a number a
row. All steps are in float32. STAGES: loads in flight. Arguments are not grouped, for the reason that
`veomni_hook.kernels.moe_experts.device` gives.
"""

import triton
import triton.language as tl

__all__ = ["gradient", "loss", "scale", "statistics"]


@triton.jit
def _transformed(raw, factor, cap, CAPPED: tl.constexpr):
    """z of the logits ``raw``."""
    z = raw.to(tl.float32) * factor
    if CAPPED:
        # tanh from exp: the interpreter has no tanh.
        z = cap * (1.0 - 2.0 / (1.0 + tl.exp(z * (2.0 / cap))))
    return z


@triton.jit
def _overwrite(
    row_logits,  # [V]: a row of logits; overwritten
    label, lse, of_probability, of_product, of_label, of_all, factor, cap,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Overwrite a row of logits with its gradient, in one pass.

    p * (of_probability + of_product * z) + of_all, plus of_label at the label; times the transform's slope.
    """
    for begin in tl.range(0, VOCAB, BLOCK, num_stages=STAGES):
        column = begin + tl.arange(0, BLOCK)
        mask = column < VOCAB
        z = _transformed(tl.load(row_logits + column, mask=mask, other=0.0), factor, cap, CAPPED)
        p = tl.exp(z - lse)
        d = p * of_probability + of_all
        if PRODUCT:
            d += p * of_product * tl.where(p > 0, z, 0.0)
        d = tl.where(column == label, d + of_label, d) * factor
        if CAPPED:
            d = d * (1.0 - (z / cap) * (z / cap))
        tl.store(row_logits + column, d.to(row_logits.dtype.element_ty), mask=mask)


@triton.jit
def _clear(row_logits, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    dtype = row_logits.dtype.element_ty
    for begin in tl.range(0, VOCAB, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        tl.store(row_logits + column, tl.zeros([BLOCK], dtype), mask=column < VOCAB)


@triton.jit
def _z_of_label(row_logits, label, factor, cap, VOCAB: tl.constexpr, CAPPED: tl.constexpr):
    """z at the label, and whether there is such a column.

    An invalid label makes loss and gradient NaN; torch would raise a device-side assertion.
    """
    valid = (label >= 0) & (label < VOCAB)
    raw = tl.load(row_logits + label, mask=valid, other=0.0)
    return tl.where(valid, _transformed(raw, factor, cap, CAPPED), float("nan")), valid


@triton.jit
def _summary(
    row_logits,  # [V]: a row of logits
    factor, cap,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    ENTROPY: tl.constexpr, PREDICTIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row's logsumexp, mean, entropy and first highest column, in one pass; 0 if not requested.

    Each lane keeps its own maximum and sums: one exponential per element, no reduction until the end.
    """
    # Finite, so that differences in lanes without elements are not NaN.
    top = tl.full([BLOCK], -1e30, tl.float32)
    sum_exp = tl.zeros([BLOCK], tl.float32)  # of exp(z - top)
    moment = tl.zeros([BLOCK], tl.float32)  # the sum of exp(z - top) * (z - top)
    sum_z = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.int32)  # the first column with top
    for begin in tl.range(0, VOCAB, BLOCK, num_stages=STAGES):
        column = begin + tl.arange(0, BLOCK)
        mask = column < VOCAB
        z = _transformed(tl.load(row_logits + column, mask=mask, other=0.0), factor, cap, CAPPED)
        if SMOOTHED:
            sum_z += tl.where(mask, z, 0.0)
        z = tl.where(mask, z, float("-inf"))
        gap = z - top
        power = tl.exp(-tl.abs(gap))
        higher = gap > 0
        if ENTROPY:
            more = moment + power * tl.where(power > 0, gap, 0.0)
            moment = tl.where(higher, power * (moment - tl.where(higher, gap, 0.0) * sum_exp), more)
        sum_exp = tl.where(higher, sum_exp * power + 1.0, sum_exp + power)
        if PREDICTIONS:
            best = tl.where(higher, column, best)
        top = tl.maximum(top, z)
    highest = tl.max(top, axis=0)
    share = tl.exp(top - highest)
    total = tl.sum(sum_exp * share, axis=0)
    lse = highest + tl.log(total)
    mean = tl.full([], 0.0, tl.float32)
    if SMOOTHED:
        mean = tl.sum(sum_z, axis=0) / VOCAB
    entropy = tl.full([], 0.0, tl.float32)
    if ENTROPY:
        # sum(p * (z - highest)) <= 0 <= log(total): nothing cancels.
        entropy = tl.log(total) - tl.sum(share * (moment + (top - highest) * sum_exp), axis=0) / total
    prediction = tl.full([], 0, tl.int32)
    if PREDICTIONS:
        prediction = tl.min(tl.where(top == highest, best, VOCAB), axis=0)
    return lse, mean, entropy, prediction


@triton.jit
def _keep(
    row, log_probs, entropies, predictions, log_prob, entropy, prediction,
    ENTROPY: tl.constexpr, PREDICTIONS: tl.constexpr,
):  # fmt: skip
    tl.store(log_probs + row, log_prob)
    if ENTROPY:
        tl.store(entropies + row, entropy)
    if PREDICTIONS:
        tl.store(predictions + row, prediction.to(tl.int64))


@triton.jit
def loss(
    logits,  # [rows, V], 16-bit or float32: overwritten by their gradient if GRADIENT
    stride_logits_row,
    target,  # [rows], int64: labels
    weights,  # [rows], float: w; read if WEIGHTED, else 1
    inverse,  # [], float32: a factor of the gradient; read if SCALED, else 1
    losses,  # [rows], float32: written, 0 for ignored rows
    log_probs,  # [rows], float32: written, 0 for ignored rows
    entropies,  # [rows], float32: likewise; written if ENTROPY
    predictions,  # [rows], int64: ignore_index for ignored rows; written if PREDICTIONS
    ignore_index, factor, cap, smoothing, z_loss,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, PREDICTIONS: tl.constexpr, GRADIENT: tl.constexpr,
    SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row's loss w * (lse - (1 - e) z[target] - e mean(z) + z_loss lse^2), and its statistics.

    If ``GRADIENT``, also d = t' w inverse ((1 + 2 z_loss lse) p - (1 - e) onehot - e / V), 0 for ignored
    rows. Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride_logits_row
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        _keep(row, log_probs, entropies, predictions, 0.0, 0.0, label, ENTROPY, PREDICTIONS)
        if GRADIENT:
            _clear(row_logits, VOCAB, BLOCK)
    else:
        # Read before anything is overwritten: the reductions in the summary synchronise warps.
        z_label, valid = _z_of_label(row_logits, label, factor, cap, VOCAB, CAPPED)
        lse, mean, entropy, prediction = _summary(
            row_logits, factor, cap, VOCAB, BLOCK, CAPPED, SMOOTHED, ENTROPY, PREDICTIONS, STAGES
        )
        log_prob = z_label - lse
        _keep(row, log_probs, entropies, predictions, log_prob, entropy, prediction, ENTROPY, PREDICTIONS)
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weights + row)
        row_loss = lse - (1.0 - smoothing) * z_label - smoothing * mean + z_loss * lse * lse
        tl.store(losses + row, weight * row_loss)
        if GRADIENT:
            if SCALED:
                weight = weight * tl.load(inverse)
            of_probability = tl.where(valid, weight * (1.0 + 2.0 * z_loss * lse), float("nan"))
            _overwrite(
                row_logits, label.to(tl.int32), lse, of_probability, 0.0, weight * (smoothing - 1.0),
                -weight * smoothing / VOCAB, factor, cap, VOCAB, BLOCK, CAPPED, False, STAGES,
            )  # fmt: skip


@triton.jit
def statistics(
    logits,  # [rows, V], 16-bit or float32
    stride_logits_row,
    target,  # [rows], int64: labels
    lses,  # [rows], float32: written, 0 for ignored rows
    log_probs,  # [rows], float32: written, 0 for ignored rows
    entropies,  # [rows], float32: likewise; written if ENTROPY
    predictions,  # [rows], int64: ignore_index for ignored rows; written if PREDICTIONS
    ignore_index, factor, cap,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
    PREDICTIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row's log_prob = z[target] - lse, entropy = -sum(p log p), first argmax(z), and lse for `gradient`.

    Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride_logits_row
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(lses + row, 0.0)
        _keep(row, log_probs, entropies, predictions, 0.0, 0.0, label, ENTROPY, PREDICTIONS)
    else:
        z_label, _ = _z_of_label(row_logits, label, factor, cap, VOCAB, CAPPED)
        lse, _, entropy, prediction = _summary(
            row_logits, factor, cap, VOCAB, BLOCK, CAPPED, False, ENTROPY, PREDICTIONS, STAGES
        )
        log_prob = z_label - lse
        _keep(row, log_probs, entropies, predictions, log_prob, entropy, prediction, ENTROPY, PREDICTIONS)
        tl.store(lses + row, lse)


@triton.jit
def gradient(
    logits,  # [rows, V], 16-bit or float32: overwritten by their gradient
    stride_logits_row,
    target,  # [rows], int64: labels
    lses,  # [rows], float32: by `statistics`
    entropies,  # [rows], float32: by `statistics`; read if ENTROPY
    dlog_probs,  # [rows], float32: the incoming gradient; read if LOG_PROBS, else 0
    dentropies,  # [rows], float32: the incoming gradient; read if ENTROPY, else 0
    ignore_index, factor, cap,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, LOG_PROBS: tl.constexpr,
    ENTROPY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d = t' (dlog_prob (onehot - p) - dentropy p (log p + entropy)), 0 for ignored rows. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride_logits_row
    label = tl.load(target + row)
    if label == ignore_index:
        _clear(row_logits, VOCAB, BLOCK)
    else:
        lse = tl.load(lses + row)
        of_label = 0.0
        of_product = 0.0
        if LOG_PROBS:
            of_label = tl.load(dlog_probs + row)
        of_probability = -of_label
        if ENTROPY:
            of_product = -tl.load(dentropies + row)
            of_probability += of_product * (tl.load(entropies + row) - lse)
        valid = (label >= 0) & (label < VOCAB)
        of_probability = tl.where(valid, of_probability, float("nan"))
        _overwrite(
            row_logits, label.to(tl.int32), lse, of_probability, of_product, of_label, 0.0, factor, cap,
            VOCAB, BLOCK, CAPPED, ENTROPY, STAGES,
        )  # fmt: skip


@triton.jit
def scale(
    x,  # [size], contiguous, float: multiplied in place
    factor,  # [], float
    size, BLOCK: tl.constexpr,
):  # fmt: skip
    """x *= factor, or nothing if it is 1. Grid: (programs,), which loop over blocks."""
    by = tl.load(factor)
    if by != 1.0:
        for number in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(size, BLOCK), tl.num_programs(0)):
            place = number * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
            values = tl.load(x + place, mask=place < size)
            tl.store(x + place, (values.to(tl.float32) * by).to(values.dtype), mask=place < size)

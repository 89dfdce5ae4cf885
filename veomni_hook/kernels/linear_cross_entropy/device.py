"""Device code of the linear cross-entropy; `veomni_hook.kernels.linear_cross_entropy.triton` launches it.

z = factor * logits, or cap * tanh(factor * logits / cap) if ``CAPPED``; t' is its slope; p = softmax(z);
lse = logsumexp(z); V = VOCAB; e = smoothing; onehot is 1 at the target.

Forward:  `statistics` log_prob = z[target] - lse;  entropy = -sum(p log p);  prediction = argmax(z)
          `loss`       these, and w * ((1 - e) (lse - z[target]) + e (lse - mean(z)) + z_loss lse^2)
Backward: `loss`       d = t' w * inverse * ((1 + 2 z_loss lse) p - (1 - e) onehot - e / V)
          `gradient`   d = t' * (dlog_prob (onehot - p) - dentropy p (log p + entropy) - dothers p)
          `scale`      x * factor
Grid: (rows of the chunk,): a program handles a row of logits, LANES times GROUP columns at a time; `scale`
differs.

Shapes: logits [rows, V], 16-bit or float32, are overwritten by their gradient; everything else has a number a
row. Rows of logits begin at multiples of 16 bytes, which is what GROUP columns take, and V is rounded up to a
multiple of GROUP in memory: these columns are overwritten by zeros. All steps are in float32; exponentials
are of base 2, and what is named so is a multiple of log2(e). STAGES: loads in flight. Arguments are not
grouped, for the reason that `veomni_hook.kernels.moe_experts.device` gives.
"""

import triton
import triton.language as tl

__all__ = ["gradient", "loss", "scale", "statistics"]

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _transformed(raw, factor, cap, CAPPED: tl.constexpr):
    """z of the logits ``raw`` in base 2: z * log2(e)."""
    if CAPPED:
        # tanh from exp: the interpreter has no tanh.
        power = tl.exp2(raw.to(tl.float32) * (factor * (2.0 / cap) * _LOG2_E))
        z2 = (cap * _LOG2_E) * (1.0 - 2.0 / (1.0 + power))
    else:
        z2 = raw.to(tl.float32) * (factor * _LOG2_E)
    return z2


@triton.jit
def _columns(LANES: tl.constexpr, GROUP: tl.constexpr):
    """The columns of a block, [LANES, GROUP]: a group is one load of a thread, which reduces it alone."""
    return tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _slope(
    raw, lse2, of_probability, of_product, of_all, factor, cap, CAPPED: tl.constexpr, PRODUCT: tl.constexpr
):
    """The gradient of the logits ``raw``: (p * (of_probability + of_product * z) + of_all) * t'."""
    z2 = _transformed(raw, factor, cap, CAPPED)
    p = tl.exp2(z2 - lse2)
    if PRODUCT:
        # -inf * 0 is NaN.
        d = p * (of_probability + (of_product * _LN_2) * tl.where(p > 0, z2, 0.0)) + of_all
    else:
        d = p * of_probability + of_all
    if CAPPED:
        tanh = z2 * (_LN_2 / cap)
        d = d * (1.0 - tanh * tanh)
    return d * factor


@triton.jit
def _overwrite(
    row_logits,  # [V]: a row of logits; overwritten
    label, lse, of_probability, of_product, of_label, of_all, factor, cap,
    VOCAB: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Overwrite a row of logits with its gradient, in one pass.

    p * (of_probability + of_product * z) + of_all, plus of_label at the label; times the transform's slope.
    The pass runs backwards: what was read last is still in the cache.
    """
    BLOCK: tl.constexpr = LANES * GROUP
    FULL: tl.constexpr = VOCAB // BLOCK
    PADDED: tl.constexpr = (VOCAB + GROUP - 1) // GROUP * GROUP
    lse2 = lse * _LOG2_E
    dtype = row_logits.dtype.element_ty
    column = _columns(LANES, GROUP)
    valid = (label >= 0) & (label < VOCAB)
    raw_label = tl.load(row_logits + label, mask=valid, other=0.0)
    tl.debug_barrier()  # read before another warp overwrites it
    if FULL * BLOCK < VOCAB:
        last = FULL * BLOCK + column
        raw = tl.load(row_logits + last, mask=last < PADDED, other=0.0)
        d = _slope(raw, lse2, of_probability, of_product, of_all, factor, cap, CAPPED, PRODUCT)
        tl.store(row_logits + last, tl.where(last < VOCAB, d, 0.0).to(dtype), mask=last < PADDED)
    for number in tl.range(0, FULL, num_stages=STAGES):
        block = row_logits + (FULL - 1 - number) * BLOCK + column
        raw = tl.load(block, eviction_policy="evict_first")
        d = _slope(raw, lse2, of_probability, of_product, of_all, factor, cap, CAPPED, PRODUCT)
        tl.store(block, d.to(dtype), eviction_policy="evict_first")
    tl.debug_barrier()
    # One column, and not a comparison for every column.
    d = _slope(raw_label, lse2, of_probability, of_product, of_all + of_label, factor, cap, CAPPED, PRODUCT)
    tl.store(row_logits + label, d.to(dtype), mask=valid)


@triton.jit
def _clear(row_logits, VOCAB: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr):
    zeros = tl.zeros([LANES, GROUP], row_logits.dtype.element_ty)
    PADDED: tl.constexpr = (VOCAB + GROUP - 1) // GROUP * GROUP
    for begin in tl.range(0, PADDED, LANES * GROUP):
        column = begin + _columns(LANES, GROUP)
        tl.store(row_logits + column, zeros, mask=column < PADDED)


@triton.jit
def _z_of_label(row_logits, label, factor, cap, VOCAB: tl.constexpr, CAPPED: tl.constexpr):
    """z at the label, and whether there is such a column.

    An invalid label makes loss and gradient NaN; torch would raise a device-side assertion.
    """
    valid = (label >= 0) & (label < VOCAB)
    raw = tl.load(row_logits + label, mask=valid, other=0.0)
    return tl.where(valid, _transformed(raw, factor, cap, CAPPED) * _LN_2, float("nan")), valid


@triton.jit
def _summed(
    z2, first, top, sum_exp, moment, sum_z, best,
    LANES: tl.constexpr, GROUP: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr,
    PREDICTIONS: tl.constexpr,
):  # fmt: skip
    """The sums of every lane with a block added, which begins at the column ``first``; -inf adds nothing."""
    if SMOOTHED:
        sum_z += tl.sum(tl.where(z2 > float("-inf"), z2, 0.0), axis=1)
    highest = tl.max(z2, axis=1)
    higher = tl.maximum(top, highest)
    power = tl.exp2(z2 - higher[:, None])
    share = tl.exp2(top - higher)
    if ENTROPY:
        # -inf * 0 is NaN.
        apart = tl.where(power > 0, z2 - higher[:, None], 0.0)
        moment = share * (moment + tl.where(share > 0, top - higher, 0.0) * sum_exp) + tl.sum(
            power * apart, axis=1
        )
    if PREDICTIONS:
        column = first + _columns(LANES, GROUP)
        here = tl.min(tl.where(z2 == highest[:, None], column, 2147483647), axis=1)
        best = tl.where(highest > top, here, best)
    return higher, sum_exp * share + tl.sum(power, axis=1), moment, sum_z, best


@triton.jit
def _summary(
    row_logits,  # [V]: a row of logits
    factor, cap,
    VOCAB: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, PREDICTIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row's logsumexp, mean, entropy and first highest column, in one pass; 0 if not requested.

    Each lane keeps its own maximum and sums: no reduction across threads until the end.
    """
    BLOCK: tl.constexpr = LANES * GROUP
    FULL: tl.constexpr = VOCAB // BLOCK
    PADDED: tl.constexpr = (VOCAB + GROUP - 1) // GROUP * GROUP
    # Finite, so that differences in lanes without elements are not NaN.
    top = tl.full([LANES], -1e30, tl.float32)
    sum_exp = tl.zeros([LANES], tl.float32)  # of exp(z - top)
    moment = tl.zeros([LANES], tl.float32)  # the sum of exp(z - top) * (z - top), in base 2
    sum_z = tl.zeros([LANES], tl.float32)  # in base 2
    best = tl.zeros([LANES], tl.int32)  # the first column with top
    column = _columns(LANES, GROUP)
    for number in tl.range(0, FULL, num_stages=STAGES):
        raw = tl.load(row_logits + number * BLOCK + column, eviction_policy="evict_last")
        z2 = _transformed(raw, factor, cap, CAPPED)
        top, sum_exp, moment, sum_z, best = _summed(
            z2,
            number * BLOCK,
            top,
            sum_exp,
            moment,
            sum_z,
            best,
            LANES,
            GROUP,
            SMOOTHED,
            ENTROPY,
            PREDICTIONS,
        )
    if FULL * BLOCK < VOCAB:
        last = FULL * BLOCK + column
        # The mask is of whole groups, or each column would be a load of its own.
        z2 = _transformed(tl.load(row_logits + last, mask=last < PADDED, other=0.0), factor, cap, CAPPED)
        z2 = tl.where(last < VOCAB, z2, float("-inf"))
        top, sum_exp, moment, sum_z, best = _summed(
            z2, FULL * BLOCK, top, sum_exp, moment, sum_z, best, LANES, GROUP, SMOOTHED, ENTROPY, PREDICTIONS
        )
    highest = tl.max(top, axis=0)
    share = tl.exp2(top - highest)
    total = tl.sum(sum_exp * share, axis=0)
    lse = (highest + tl.log2(total)) * _LN_2
    mean = tl.full([], 0.0, tl.float32)
    if SMOOTHED:
        mean = tl.sum(sum_z, axis=0) * (_LN_2 / VOCAB)
    entropy = tl.full([], 0.0, tl.float32)
    if ENTROPY:
        # sum(p * (z - highest)) <= 0 <= log(total): nothing cancels.
        moments = tl.sum(share * (moment + (top - highest) * sum_exp), axis=0)
        entropy = (tl.log2(total) - moments / total) * _LN_2
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
    VOCAB: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, PREDICTIONS: tl.constexpr, GRADIENT: tl.constexpr,
    SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row's loss w * (lse - (1 - e) z[target] - e mean(z) + z_loss lse^2), and its statistics.

    If ``GRADIENT``, also d = t' w inverse ((1 + 2 z_loss lse) p - (1 - e) onehot - e / V), 0 for ignored
    rows. Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + tl.multiple_of(row * stride_logits_row, GROUP)
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        _keep(row, log_probs, entropies, predictions, 0.0, 0.0, label, ENTROPY, PREDICTIONS)
        if GRADIENT:
            _clear(row_logits, VOCAB, LANES, GROUP)
    else:
        # Read before anything is overwritten: the reductions in the summary synchronise warps.
        z_label, valid = _z_of_label(row_logits, label, factor, cap, VOCAB, CAPPED)
        lse, mean, entropy, prediction = _summary(
            row_logits, factor, cap, VOCAB, LANES, GROUP, CAPPED, SMOOTHED, ENTROPY, PREDICTIONS, STAGES
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
                -weight * smoothing / VOCAB, factor, cap, VOCAB, LANES, GROUP, CAPPED, False, STAGES,
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
    VOCAB: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    PREDICTIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row's log_prob = z[target] - lse, entropy = -sum(p log p), first argmax(z), and lse for `gradient`.

    Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + tl.multiple_of(row * stride_logits_row, GROUP)
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(lses + row, 0.0)
        _keep(row, log_probs, entropies, predictions, 0.0, 0.0, label, ENTROPY, PREDICTIONS)
    else:
        z_label, _ = _z_of_label(row_logits, label, factor, cap, VOCAB, CAPPED)
        lse, _, entropy, prediction = _summary(
            row_logits, factor, cap, VOCAB, LANES, GROUP, CAPPED, False, ENTROPY, PREDICTIONS, STAGES
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
    dothers,  # [rows], float32: the sum of those of log-probabilities of other tokens; read if OTHERS, else 0
    ignore_index, factor, cap,
    VOCAB: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
    LOG_PROBS: tl.constexpr,
    ENTROPY: tl.constexpr, OTHERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d = t' (dlog_prob (onehot - p) - dentropy p (log p + entropy) - dothers p), 0 for ignored rows.

    The caller writes the columns of other tokens. Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + tl.multiple_of(row * stride_logits_row, GROUP)
    label = tl.load(target + row)
    if label == ignore_index:
        _clear(row_logits, VOCAB, LANES, GROUP)
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
        if OTHERS:
            of_probability -= tl.load(dothers + row)
        valid = (label >= 0) & (label < VOCAB)
        of_probability = tl.where(valid, of_probability, float("nan"))
        _overwrite(
            row_logits, label.to(tl.int32), lse, of_probability, of_product, of_label, 0.0, factor, cap,
            VOCAB, LANES, GROUP, CAPPED, ENTROPY, STAGES,
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

"""Device code of routers; `veomni_hook.kernels.moe_router.triton` launches it.

With x the logits of a token, p their softmax, v those of its TOP_K chosen experts, and s(v) their scores:

    KIND  NORMALISE  forward                                  backward
    0     yes        w = softmax(v)                           dv = w * (dw - sum(dw * w))
    0     no         w = p at the chosen                      dx = p * ([chosen] dw - sum(dw * w))
    1, 2  yes        w = s(v) / D, D = sum(s(v)) + epsilon    dv = s'(v) * (dw - sum(dw * s(v)) / D) / D
    1, 2  no         w = s(v)                                 dv = s'(v) * dw

KIND is 0 for a softmax, 1 for the sigmoid, 2 for the square root of softplus. dx is dv at the chosen experts
and, except in the second, 0 at others.

If GIVEN, a forward does not choose: the experts of each token are read. They become the keys, in their order,
and everything after the choice is the same code, so that it rounds as it did when they were chosen.
"""

import triton
import triton.language as tl

__all__ = ["backward", "backward_of_all", "forward", "forward_grouped"]

# The key of taken experts and of padding columns, below minus infinity.
_TAKEN = tl.constexpr(-(1 << 63))
_TAKEN_NARROW = tl.constexpr(-(1 << 31))
_POSITIVE = tl.constexpr((1 << 31) - 1)
# A 16-bit number has at least 13 zero bits as float32.
_KEPT = tl.constexpr(-(1 << 13))


@triton.jit
def _keys(value, place, exists, NARROW: tl.constexpr):
    """Integers in the order of float32 ``value``, NaN above all; ties are ordered by ``place``.

    NARROW: of 32 bits, for values that fit into 16.
    """
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # makes 0 and -0 equal
    order = bits ^ ((bits >> 31) & _POSITIVE)
    order = tl.where(value != value, _POSITIVE, order)  # noqa: PLR0124
    if NARROW:
        key = tl.where(exists, (order & _KEPT) | place, _TAKEN_NARROW)
    else:
        key = tl.where(exists, (order.to(tl.int64) << 32) | place.to(tl.int64), _TAKEN)
    return key


@triton.jit
def _value(key, NARROW: tl.constexpr):
    """The float32 from which `_keys` made ``key``."""
    if NARROW:
        order = key & _KEPT
        bits = (order ^ ((order >> 31) & _POSITIVE)) & _KEPT
    else:
        order = (key >> 32).to(tl.int32)
        bits = order ^ ((order >> 31) & _POSITIVE)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest(
    keys, TOP_K: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    """The ``TOP_K`` largest keys of each row, in order, as [ROWS, SLOTS]."""
    slot = tl.arange(0, SLOTS)
    largest = tl.zeros([ROWS, SLOTS], keys.dtype)
    for k in range(TOP_K):
        best = tl.max(keys, axis=1)[:, None]
        largest = tl.where(slot[None, :] == k, best, largest)
        keys = tl.where(keys == best, _TAKEN_NARROW if NARROW else _TAKEN, keys)
    return largest


@triton.jit
def _given_keys(
    given, row, kept_row, exists, expert, place, TOP_K: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    """Keys whose ``TOP_K`` largest are the experts that ``given`` ([rows, TOP_K]) names, in its order."""
    rank = tl.zeros_like(place)
    for k in range(TOP_K):
        named = tl.load(given + row * TOP_K + k, mask=kept_row, other=0)
        rank = tl.where(expert[None, :] == named[:, None], TOP_K - k, rank)
    if NARROW:
        key = tl.where(exists, (rank << 13) | place, _TAKEN_NARROW)
    else:
        key = tl.where(exists, (rank.to(tl.int64) << 32) | place.to(tl.int64), _TAKEN)
    return key


@triton.jit
def _score(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """A score of float32 ``x``, in float32, rounded as often as upstream's operations round to ``DTYPE``."""
    if KIND == 1:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-x))
    else:
        # log(1 + e) of a small e: the quotient cancels the sum's rounding error.
        e = tl.exp(tl.minimum(x, 20.0))
        u = 1.0 + e
        softplus = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        softplus = tl.where(x > 20.0, x, softplus)
        softplus = tl.where(x != x, x, softplus)  # noqa: PLR0124
        score = tl.sqrt_rn(softplus.to(DTYPE).to(tl.float32))
    return score.to(DTYPE).to(tl.float32)


@triton.jit
def _slope(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The derivative of `_score`."""
    score = _score(x, KIND, DTYPE)
    if KIND == 1:
        slope = score * (1.0 - score)
    else:
        slope = tl.where(x > 20.0, 1.0, 1.0 / (1.0 + tl.exp(-x))) / (2.0 * score)
    return slope


@triton.jit
def _weights(v, chosen, epsilon, KIND: tl.constexpr, NORMALISE: tl.constexpr, DTYPE: tl.constexpr):
    """Weights from the scores of the logits ``v``, ``[ROWS, SLOTS]``; 0 in slots that are not ``chosen``."""
    w = tl.where(chosen, _score(v, KIND, DTYPE), 0.0)
    if NORMALISE:
        total = tl.sum(w, axis=1).to(DTYPE).to(tl.float32)
        w = tl.div_rn(w, tl.zeros_like(w) + (total + epsilon).to(DTYPE).to(tl.float32)[:, None])
    return w


@triton.jit(do_not_specialize=["rows"])
def forward(
    x,  # [rows, EXPERTS] in float32, bfloat16 or float16, strided: the logits of each token
    bias,  # [EXPERTS] in float32, bfloat16 or float16: added to scores for the choice; not read if KIND is 0
    given,  # [rows, TOP_K], int64: the experts; read if GIVEN
    weights,  # [rows, TOP_K]: a result, w
    indices,  # [rows, TOP_K], int64: a result, the chosen experts, from best to worst
    chosen,  # [rows, TOP_K], the dtype of x: a result for the backward, v
    rows,
    stride_x_row,
    epsilon,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds EXPERTS
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two that holds TOP_K
    ROWS: tl.constexpr,  # per program
    KIND: tl.constexpr,
    NORMALISE: tl.constexpr,
    NARROW: tl.constexpr,  # keys of 32 bits
    CHOICE: tl.constexpr,  # dtype of score + bias
    GIVEN: tl.constexpr,  # experts are given
):  # fmt: skip
    """w of the experts with the largest x (KIND 0) or s(x) + bias. Grid: cdiv(rows, ROWS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    kept = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    x_row = x + (row * stride_x_row)[:, None]
    logits = tl.load(x_row + expert[None, :], mask=kept, other=0.0)
    x32 = logits.to(tl.float32)
    if KIND == 0:
        value = x32
    else:
        bias32 = tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
        value = (_score(x32, KIND, logits.dtype) + bias32[None, :]).to(CHOICE).to(tl.float32)
    place = tl.zeros_like(x32).to(tl.int32) + (BLOCK - 1 - expert)[None, :]
    if GIVEN:
        keys = _given_keys(given, row, row < rows, expert[None, :] < EXPERTS, expert, place, TOP_K, NARROW)
    else:
        keys = _keys(value, place, expert[None, :] < EXPERTS, NARROW)
    best = _largest(keys, TOP_K, ROWS, SLOTS, NARROW)
    index = BLOCK - 1 - (best & (BLOCK - 1)).to(tl.int32)
    kept_slot = (row < rows)[:, None] & (slot < TOP_K)[None, :]
    if KIND == 0:
        if GIVEN:
            v = tl.load(x_row + index, mask=kept_slot, other=float("-inf")).to(tl.float32)
            # Any expert may be given, so that the first need not be the best one.
            if NORMALISE:
                largest = tl.max(v, axis=1)
            else:
                largest = tl.max(tl.where((expert < EXPERTS)[None, :], x32, float("-inf")), axis=1)
        else:
            v = tl.where(kept_slot, _value(best, NARROW), float("-inf"))
            largest = tl.max(tl.where(slot[None, :] == 0, _value(best, NARROW), float("-inf")), axis=1)
        power = tl.exp(v - largest[:, None])
        if NORMALISE:
            total = tl.sum(tl.where(kept_slot, power, 0.0), axis=1)
        else:
            power_of_all = tl.exp(x32 - largest[:, None])
            total = tl.sum(tl.where((expert < EXPERTS)[None, :], power_of_all, 0.0), axis=1)
        w = power / total[:, None]
    else:
        v = tl.load(x_row + index, mask=kept_slot, other=0.0).to(tl.float32)
        w = _weights(v, kept_slot, epsilon, KIND, NORMALISE, logits.dtype)
    result_place = row[:, None] * TOP_K + slot[None, :]
    tl.store(weights + result_place, w.to(weights.dtype.element_ty), mask=kept_slot)
    tl.store(indices + result_place, index.to(tl.int64), mask=kept_slot)
    tl.store(chosen + result_place, v.to(chosen.dtype.element_ty), mask=kept_slot)


@triton.jit(do_not_specialize=["rows"])
def forward_grouped(
    x,  # [rows, GROUPS * MEMBERS] in float32, bfloat16 or float16, strided: the logits of each token
    bias,  # [GROUPS * MEMBERS] in float32, bfloat16 or float16: added to scores for the choice
    given,  # [rows, TOP_K], int64: the experts; read if GIVEN
    weights,  # [rows, TOP_K]: a result, w
    indices,  # [rows, TOP_K], int64: a result, the chosen experts, from best to worst
    chosen,  # [rows, TOP_K], the dtype of x: a result for the backward, v
    rows,
    stride_x_row,
    epsilon,
    fill,  # what stands for s(x) + bias in groups that are not chosen
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,  # a power of two that holds GROUPS
    MEMBERS: tl.constexpr,  # experts per group
    MEMBER_BLOCK: tl.constexpr,  # a power of two that holds MEMBERS
    BEST_GROUPS: tl.constexpr,  # groups that are chosen
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two that holds TOP_K
    ROWS: tl.constexpr,  # per program
    KIND: tl.constexpr,
    NORMALISE: tl.constexpr,
    CHOICE: tl.constexpr,  # dtype of score + bias
    GIVEN: tl.constexpr,  # experts are given
):  # fmt: skip
    """w, of KIND 1 or 2, of the experts with the largest s(x) + bias within the BEST_GROUPS best groups.

    A group is as good as the sum of its two best members. Grid: cdiv(rows, ROWS).
    """
    BLOCK: tl.constexpr = GROUP_BLOCK * MEMBER_BLOCK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    column = tl.arange(0, BLOCK)
    group, member = column // MEMBER_BLOCK, column % MEMBER_BLOCK
    expert = group * MEMBERS + member
    exists = (group < GROUPS) & (member < MEMBERS)
    x_row = x + (row * stride_x_row)[:, None]
    logits = tl.load(x_row + expert[None, :], mask=(row < rows)[:, None] & exists[None, :], other=0.0)
    bias32 = tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    value = (_score(logits.to(tl.float32), KIND, logits.dtype) + bias32[None, :]).to(CHOICE).to(tl.float32)
    place = tl.zeros_like(value).to(tl.int32) + (BLOCK - 1 - expert)[None, :]
    keys = tl.reshape(_keys(value, place, exists[None, :], False), [ROWS, GROUP_BLOCK, MEMBER_BLOCK])
    first = tl.max(keys, axis=2)
    second = tl.max(tl.where(keys == first[:, :, None], _TAKEN, keys), axis=2)
    number = tl.arange(0, GROUP_BLOCK)
    quality = (_value(first, False) + _value(second, False)).to(CHOICE).to(tl.float32)
    group_place = tl.zeros_like(quality).to(tl.int32) + (GROUP_BLOCK - 1 - number)[None, :]
    group_keys = _keys(quality, group_place, number[None, :] < GROUPS, False)
    for _ in range(BEST_GROUPS):
        group_keys = tl.where(group_keys == tl.max(group_keys, axis=1)[:, None], _TAKEN, group_keys)
    in_best = (group_keys == _TAKEN).to(tl.int32)[:, :, None] + tl.zeros_like(keys).to(tl.int32)
    in_best = tl.reshape(in_best, [ROWS, BLOCK]) > 0
    value = tl.where(in_best, value, fill)
    if GIVEN:
        keys = _given_keys(given, row, row < rows, exists[None, :], expert, place, TOP_K, False)
    else:
        keys = _keys(value, place, exists[None, :], False)
    best = _largest(keys, TOP_K, ROWS, SLOTS, False)
    index = BLOCK - 1 - (best & (BLOCK - 1)).to(tl.int32)
    kept_slot = (row < rows)[:, None] & (slot < TOP_K)[None, :]
    v = tl.load(x_row + index, mask=kept_slot, other=0.0).to(tl.float32)
    w = _weights(v, kept_slot, epsilon, KIND, NORMALISE, logits.dtype)
    result_place = row[:, None] * TOP_K + slot[None, :]
    tl.store(weights + result_place, w.to(weights.dtype.element_ty), mask=kept_slot)
    tl.store(indices + result_place, index.to(tl.int64), mask=kept_slot)
    tl.store(chosen + result_place, v.to(chosen.dtype.element_ty), mask=kept_slot)


@triton.jit(do_not_specialize=["rows"])
def backward(
    chosen,  # [rows, TOP_K] in float32, bfloat16 or float16: v, the largest first if KIND is 0 and not GIVEN
    indices,  # [rows, TOP_K], int64: the chosen experts
    dweights,  # [rows, TOP_K]: dw, the gradient of w
    dx,  # [rows, EXPERTS], the dtype of chosen: the result
    rows,
    epsilon,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds EXPERTS
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,  # per program
    KIND: tl.constexpr,
    NORMALISE: tl.constexpr,
    GIVEN: tl.constexpr,  # the first v need not be the largest
):  # fmt: skip
    """dx, which is dv at the chosen experts and 0 at others. Grid: cdiv(rows, ROWS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = row < rows
    expert = tl.arange(0, BLOCK)
    first_slot = row * TOP_K
    dtype: tl.constexpr = chosen.dtype.element_ty
    largest = tl.load(chosen + first_slot, mask=inside, other=0.0).to(tl.float32)
    if GIVEN and KIND == 0:
        for k in range(1, TOP_K):
            v = tl.load(chosen + first_slot + k, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, v)
    total = tl.zeros([ROWS], tl.float32)
    product = tl.zeros([ROWS], tl.float32)
    if NORMALISE:
        for k in range(TOP_K):
            dw = tl.load(dweights + first_slot + k, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(chosen + first_slot + k, mask=inside, other=0.0).to(tl.float32)
            if KIND == 0:
                w = tl.exp(v - largest)
            else:
                w = _score(v, KIND, dtype)
            total += w
            product += dw * w
        if KIND != 0:
            total = (total.to(dtype).to(tl.float32) + epsilon).to(dtype).to(tl.float32)
        product = product / total
    result = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in range(TOP_K):
        dw = tl.load(dweights + first_slot + k, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(chosen + first_slot + k, mask=inside, other=0.0).to(tl.float32)
        index = tl.load(indices + first_slot + k, mask=inside, other=0)
        if NORMALISE:
            dw = (dw - product) / total
        if KIND == 0:
            dv = dw * tl.exp(v - largest)
        else:
            dv = dw * _slope(v, KIND, dtype)
        result = tl.where(expert[None, :] == index[:, None], dv[:, None], result)
    kept = inside[:, None] & (expert < EXPERTS)[None, :]
    tl.store(dx + row[:, None] * EXPERTS + expert[None, :], result.to(dx.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def backward_of_all(
    x,  # [rows, EXPERTS] in float32, bfloat16 or float16, strided: the logits of each token
    indices,  # [rows, TOP_K], int64: the chosen experts
    dweights,  # [rows, TOP_K], float32: dw, the gradient of w
    dx,  # [rows, EXPERTS], the dtype of x: the result
    rows,
    stride_x_row,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds EXPERTS
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,  # per program
):  # fmt: skip
    """dx = p * ([chosen] dw - sum(dw * w)), for KIND 0 without NORMALISE. Grid: cdiv(rows, ROWS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = row < rows
    expert = tl.arange(0, BLOCK)
    kept = inside[:, None] & (expert < EXPERTS)[None, :]
    first_slot = row * TOP_K
    x_row = x + (row * stride_x_row)[:, None]
    p = tl.load(x_row + expert[None, :], mask=kept, other=float("-inf")).to(tl.float32)
    p = tl.where(inside[:, None], p, 0.0)
    p = tl.exp(p - tl.max(p, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    dp = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in range(TOP_K):
        dw = tl.load(dweights + first_slot + k, mask=inside, other=0.0)
        index = tl.load(indices + first_slot + k, mask=inside, other=0)
        dp = tl.where(expert[None, :] == index[:, None], dw[:, None], dp)
    result = p * (dp - tl.sum(p * dp, axis=1)[:, None])
    tl.store(dx + row[:, None] * EXPERTS + expert[None, :], result.to(dx.dtype.element_ty), mask=kept)

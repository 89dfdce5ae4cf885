"""The device code of routers; `veomni_hook.kernels.moe_router.triton` describes and launches it."""

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
def _keys(value, place, there, NARROW: tl.constexpr):
    """Integers in the order of float32 ``value``, NaN above all; ties are ordered by ``place``."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # makes 0 and -0 equal
    order = bits ^ ((bits >> 31) & _POSITIVE)
    order = tl.where(value != value, _POSITIVE, order)  # noqa: PLR0124
    if NARROW:
        key = tl.where(there, (order & _KEPT) | place, _TAKEN_NARROW)
    else:
        key = tl.where(there, (order.to(tl.int64) << 32) | place.to(tl.int64), _TAKEN)
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
    left, TOP_K: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    """The ``TOP_K`` largest keys of each row, in order."""
    slot = tl.arange(0, SLOTS)
    taken = tl.zeros([ROWS, SLOTS], left.dtype)
    for k in range(TOP_K):
        best = tl.max(left, axis=1)[:, None]
        taken = tl.where(slot[None, :] == k, best, taken)
        left = tl.where(left == best, _TAKEN_NARROW if NARROW else _TAKEN, left)
    return taken


@triton.jit
def _score(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """A score of float32 ``x``, in float32, rounded as often as upstream's operations round to ``DTYPE``."""
    if KIND == 1:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-x))
    else:
        # log(1 + e) of a small e: the quotient cancels the sum's rounding error.
        e = tl.exp(tl.minimum(x, 20.0))
        u = 1.0 + e
        soft = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        soft = tl.where(x > 20.0, x, soft)
        soft = tl.where(x != x, x, soft)  # noqa: PLR0124
        score = tl.sqrt_rn(soft.to(DTYPE).to(tl.float32))
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
def _weights(v, has, epsilon, KIND: tl.constexpr, NORMALISE: tl.constexpr, DTYPE: tl.constexpr):
    """Weights from the scores of the chosen logits ``v``, ``[ROWS, SLOTS]``."""
    w = tl.where(has, _score(v, KIND, DTYPE), 0.0)
    if NORMALISE:
        total = tl.sum(w, axis=1).to(DTYPE).to(tl.float32)
        w = tl.div_rn(w, tl.zeros_like(w) + (total + epsilon).to(DTYPE).to(tl.float32)[:, None])
    return w


@triton.jit(do_not_specialize=["rows"])
def forward(
    x, bias, weights, indices, chosen, rows, stride, epsilon,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, NARROW: tl.constexpr,
    CHOICE: tl.constexpr,
):  # fmt: skip
    """Route ``ROWS`` tokens by a softmax (KIND 0; NORMALISE: over the chosen) or by scores and a bias."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    there = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    begin = x + (row * stride)[:, None]
    held = tl.load(begin + expert[None, :], mask=there, other=0.0)
    x32 = held.to(tl.float32)
    if KIND == 0:
        value = x32
    else:
        by = tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
        value = (_score(x32, KIND, held.dtype) + by[None, :]).to(CHOICE).to(tl.float32)
    place = tl.zeros_like(x32).to(tl.int32) + (BLOCK - 1 - expert)[None, :]
    keys = _keys(value, place, expert[None, :] < EXPERTS, NARROW)
    best = _largest(keys, TOP_K, ROWS, SLOTS, NARROW)
    index = BLOCK - 1 - (best & (BLOCK - 1)).to(tl.int32)
    has = (row < rows)[:, None] & (slot < TOP_K)[None, :]
    if KIND == 0:
        v = tl.where(has, _value(best, NARROW), float("-inf"))
        most = tl.max(tl.where(slot[None, :] == 0, _value(best, NARROW), float("-inf")), axis=1)
        power = tl.exp(v - most[:, None])
        if NORMALISE:
            total = tl.sum(tl.where(has, power, 0.0), axis=1)
        else:
            every = tl.exp(x32 - most[:, None])
            total = tl.sum(tl.where((expert < EXPERTS)[None, :], every, 0.0), axis=1)
        w = power / total[:, None]
    else:
        v = tl.load(begin + index, mask=has, other=0.0).to(tl.float32)
        w = _weights(v, has, epsilon, KIND, NORMALISE, held.dtype)
    out = row[:, None] * TOP_K + slot[None, :]
    tl.store(weights + out, w.to(weights.dtype.element_ty), mask=has)
    tl.store(indices + out, index.to(tl.int64), mask=has)
    tl.store(chosen + out, v.to(chosen.dtype.element_ty), mask=has)


@triton.jit(do_not_specialize=["rows"])
def forward_grouped(
    x, bias, weights, indices, chosen, rows, stride, epsilon, fill,
    GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, MEMBERS: tl.constexpr, MEMBER_BLOCK: tl.constexpr,
    BEST_GROUPS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    NORMALISE: tl.constexpr, CHOICE: tl.constexpr,
):  # fmt: skip
    """Route ``ROWS`` tokens by sigmoid scores and a bias, within the ``BEST_GROUPS`` best groups."""
    BLOCK: tl.constexpr = GROUP_BLOCK * MEMBER_BLOCK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    column = tl.arange(0, BLOCK)
    group, member = column // MEMBER_BLOCK, column % MEMBER_BLOCK
    expert = group * MEMBERS + member
    exists = (group < GROUPS) & (member < MEMBERS)
    begin = x + (row * stride)[:, None]
    held = tl.load(begin + expert[None, :], mask=(row < rows)[:, None] & exists[None, :], other=0.0)
    by = tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    value = (_score(held.to(tl.float32), 1, held.dtype) + by[None, :]).to(CHOICE).to(tl.float32)
    place = tl.zeros_like(value).to(tl.int32) + (BLOCK - 1 - expert)[None, :]
    # A group's score is the sum of its two best members.
    keys = tl.reshape(_keys(value, place, exists[None, :], False), [ROWS, GROUP_BLOCK, MEMBER_BLOCK])
    first = tl.max(keys, axis=2)
    second = tl.max(tl.where(keys == first[:, :, None], _TAKEN, keys), axis=2)
    number = tl.arange(0, GROUP_BLOCK)
    quality = (_value(first, False) + _value(second, False)).to(CHOICE).to(tl.float32)
    groups = tl.zeros_like(quality).to(tl.int32) + (GROUP_BLOCK - 1 - number)[None, :]
    left = _keys(quality, groups, number[None, :] < GROUPS, False)
    for _ in range(BEST_GROUPS):
        left = tl.where(left == tl.max(left, axis=1)[:, None], _TAKEN, left)
    good = (left == _TAKEN).to(tl.int32)[:, :, None] + tl.zeros_like(keys).to(tl.int32)
    good = tl.reshape(good, [ROWS, BLOCK]) > 0
    value = tl.where(good, value, fill)
    best = _largest(_keys(value, place, exists[None, :], False), TOP_K, ROWS, SLOTS, False)
    index = BLOCK - 1 - (best & (BLOCK - 1)).to(tl.int32)
    has = (row < rows)[:, None] & (slot < TOP_K)[None, :]
    v = tl.load(begin + index, mask=has, other=0.0).to(tl.float32)
    w = _weights(v, has, epsilon, 1, NORMALISE, held.dtype)
    out = row[:, None] * TOP_K + slot[None, :]
    tl.store(weights + out, w.to(weights.dtype.element_ty), mask=has)
    tl.store(indices + out, index.to(tl.int64), mask=has)
    tl.store(chosen + out, v.to(chosen.dtype.element_ty), mask=has)


@triton.jit(do_not_specialize=["rows"])
def backward(
    chosen, indices, dweights, dx, rows, epsilon,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
    KIND: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Gradients of ``ROWS`` tokens' logits from the chosen ones, the largest first if KIND is 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = row < rows
    expert = tl.arange(0, BLOCK)
    at = row * TOP_K
    dtype: tl.constexpr = chosen.dtype.element_ty
    most = tl.load(chosen + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    product = tl.zeros([ROWS], tl.float32)
    if NORMALISE:
        for k in range(TOP_K):
            dw = tl.load(dweights + at + k, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(chosen + at + k, mask=inside, other=0.0).to(tl.float32)
            if KIND == 0:
                w = tl.exp(v - most)
            else:
                w = _score(v, KIND, dtype)
            total += w
            product += dw * w
        if KIND != 0:
            total = (total.to(dtype).to(tl.float32) + epsilon).to(dtype).to(tl.float32)
        product = product / total
    found = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in range(TOP_K):
        dw = tl.load(dweights + at + k, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(chosen + at + k, mask=inside, other=0.0).to(tl.float32)
        index = tl.load(indices + at + k, mask=inside, other=0)
        if NORMALISE:
            dw = (dw - product) / total
        if KIND == 0:
            d = dw * tl.exp(v - most)
        else:
            d = dw * _slope(v, KIND, dtype)
        found = tl.where(expert[None, :] == index[:, None], d[:, None], found)
    there = inside[:, None] & (expert < EXPERTS)[None, :]
    tl.store(dx + row[:, None] * EXPERTS + expert[None, :], found.to(dx.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def backward_of_all(
    x, indices, dweights, dx, rows, stride,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of ``ROWS`` tokens' logits through a softmax over all experts."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = row < rows
    expert = tl.arange(0, BLOCK)
    there = inside[:, None] & (expert < EXPERTS)[None, :]
    at = row * TOP_K
    begin = x + (row * stride)[:, None]
    p = tl.load(begin + expert[None, :], mask=there, other=float("-inf")).to(tl.float32)
    p = tl.where(inside[:, None], p, 0.0)
    p = tl.exp(p - tl.max(p, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    incoming = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in range(TOP_K):
        dw = tl.load(dweights + at + k, mask=inside, other=0.0)
        index = tl.load(indices + at + k, mask=inside, other=0)
        incoming = tl.where(expert[None, :] == index[:, None], dw[:, None], incoming)
    found = p * (incoming - tl.sum(p * incoming, axis=1)[:, None])
    tl.store(dx + row[:, None] * EXPERTS + expert[None, :], found.to(dx.dtype.element_ty), mask=there)

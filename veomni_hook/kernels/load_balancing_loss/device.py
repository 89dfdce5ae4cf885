"""Device code of the load-balancing loss; `veomni_hook.kernels.load_balancing_loss.triton` launches it.

p = softmax(logits of a row), rounded to MIDDLE; k is the row's weight in the mask, 1 unless ``MASKED``.

Forward:  shares_e = sum(k * [e in top_k(p)]),  sums_e = sum(k * p_e), over the rows of all layers
Backward: dlogits = k * p * (s - sum_e p_e s_e)
Shapes: L layers with logits [R, E] each, of one dtype, 16-bit or float32. Sums are in float32. A program
holds ROWS rows and BLOCK columns at once, a power of two that is not less than E.
"""

import triton
import triton.language as tl

__all__ = ["backward", "forward"]


@triton.jit
def _probabilities(
    addresses, row_weights, first_layer,  # as in `forward`
    number, rows,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """Block ``number`` of the rows of all layers.

    Returns its layer; [ROWS, BLOCK]: positions in the layer, which of them exist, and p; and [ROWS]: k.
    """
    blocks = tl.cdiv(rows, ROWS)
    layer = number // blocks
    row = (number % blocks) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    position = row[:, None] * EXPERTS + expert[None, :]
    logits = tl.load(addresses + layer).to(tl.pointer_type(first_layer.dtype.element_ty))
    x = tl.load(tl.multiple_of(logits, 16) + position, mask=mask, other=float("-inf")).to(tl.float32)
    x = tl.where((row < rows)[:, None], x, 0.0)
    power = tl.exp(x - tl.max(x, axis=1)[:, None])
    p = power / tl.sum(power, axis=1)[:, None]
    p = p.to(MIDDLE).to(tl.float32)
    k = tl.where(row < rows, 1.0, 0.0)
    if MASKED:
        k = tl.load(row_weights + row, mask=row < rows, other=0.0)
    return layer, position, mask, p, k


@triton.jit
def forward(
    addresses,  # [L], int64: where the logits of each layer begin, aligned to 16 bytes
    row_weights,  # [R], float32: k, the same for every layer; read if MASKED
    partial,  # [programs, 2, E], float32: a program's shares and sums; written
    layers, rows,  # L, R
    first_layer,  # [R, E]: logits, for their dtype; not read
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, MIDDLE: tl.constexpr,
):  # fmt: skip
    """shares_e = sum(k * [e in top_k(p)]) and sums_e = sum(k * p_e) over a program's rows.

    Grid: (programs,); each takes every so many blocks of ROWS rows, counted through all layers.
    """
    expert = tl.arange(0, BLOCK)
    shares = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for number in tl.range(tl.program_id(0), layers * tl.cdiv(rows, ROWS), tl.num_programs(0)):
        _, _, mask, p, k = _probabilities(
            addresses, row_weights, first_layer, number, rows, EXPERTS, BLOCK, ROWS, MASKED, MIDDLE
        )
        sums += tl.sum(p * k[:, None], axis=0)
        # On ties, take the first expert; exclude chosen experts.
        left = tl.where(mask, p, -1.0)
        for _ in tl.static_range(TOP_K):
            best = tl.max(left, axis=1)
            first = tl.min(tl.where(left == best[:, None], expert[None, :], BLOCK), axis=1)
            left = tl.where(expert[None, :] == first[:, None], -2.0, left)
        shares += tl.sum(tl.where(left == -2.0, k[:, None], 0.0), axis=0)
    result = partial + tl.program_id(0).to(tl.int64) * 2 * EXPERTS + expert
    tl.store(result, shares, mask=expert < EXPERTS)
    tl.store(result + EXPERTS, sums, mask=expert < EXPERTS)


@triton.jit
def backward(
    addresses,  # [L], int64: where the logits of each layer begin, aligned to 16 bytes
    row_weights,  # [R], float32: k, the same for every layer; read if MASKED
    slope,  # [E], float32: s
    dlogits,  # [L, R, E], the dtype of the logits: written
    rows,  # R
    first_layer,  # [R, E]: logits, for their dtype; not read
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """dlogits = k * p * (s - sum_e p_e s_e). Grid: (L * ceil(R / ROWS),), a block of rows each."""
    number = tl.program_id(0)
    layer, position, mask, p, k = _probabilities(
        addresses, row_weights, first_layer, number, rows, EXPERTS, BLOCK, ROWS, MASKED, MIDDLE
    )
    expert = tl.arange(0, BLOCK)
    s = tl.load(slope + expert, mask=expert < EXPERTS, other=0.0)[None, :]
    gradient = k[:, None] * p * (s - tl.sum(p * s, axis=1)[:, None])
    dlogits_pointers = dlogits + layer.to(tl.int64) * rows * EXPERTS + position
    tl.store(dlogits_pointers, gradient.to(dlogits.dtype.element_ty), mask=mask)

"""Device code of the load-balancing loss; `veomni_hook.kernels.load_balancing_loss.triton` launches it."""

import triton
import triton.language as tl

__all__ = ["backward", "forward"]


@triton.jit
def _probabilities(
    table, mask, number, rows, like,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """Block ``number`` of all layers' rows: its layer and position, softmax and weight of its rows."""
    blocks = tl.cdiv(rows, ROWS)
    layer = number // blocks
    row = (number % blocks) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    place = row[:, None] * EXPERTS + expert[None, :]
    logits = tl.load(table + layer).to(tl.pointer_type(like.dtype.element_ty))
    x = tl.load(tl.multiple_of(logits, 16) + place, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where((row < rows)[:, None], x, 0.0)
    power = tl.exp(x - tl.max(x, axis=1)[:, None])
    p = power / tl.sum(power, axis=1)[:, None]
    p = p.to(MIDDLE).to(tl.float32)
    kept = tl.where(row < rows, 1.0, 0.0)
    if MASKED:
        kept = tl.load(mask + row, mask=row < rows, other=0.0)
    return layer, place, inside, p, kept


@triton.jit
def forward(
    table, mask, partial, layers, rows, like,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, MIDDLE: tl.constexpr,
):  # fmt: skip
    """Sum a strided set of row blocks over all layers into one ``[2, EXPERTS]`` of ``partial``."""
    expert = tl.arange(0, BLOCK)
    shares = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for number in tl.range(tl.program_id(0), layers * tl.cdiv(rows, ROWS), tl.num_programs(0)):
        _, _, inside, p, kept = _probabilities(
            table, mask, number, rows, like, EXPERTS, BLOCK, ROWS, MASKED, MIDDLE
        )
        sums += tl.sum(p * kept[:, None], axis=0)
        # On ties, take the first expert; exclude chosen experts.
        left = tl.where(inside, p, -1.0)
        for _ in tl.static_range(TOP_K):
            best = tl.max(left, axis=1)
            first = tl.min(tl.where(left == best[:, None], expert[None, :], BLOCK), axis=1)
            left = tl.where(expert[None, :] == first[:, None], -2.0, left)
        shares += tl.sum(tl.where(left == -2.0, kept[:, None], 0.0), axis=0)
    here = partial + tl.program_id(0).to(tl.int64) * 2 * EXPERTS + expert
    tl.store(here, shares, mask=expert < EXPERTS)
    tl.store(here + EXPERTS, sums, mask=expert < EXPERTS)


@triton.jit
def backward(
    table, mask, slope, out, rows, like,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of rows of one layer: ``p * kept * (slope - sum(p * slope))``."""
    number = tl.program_id(0)
    layer, place, inside, p, kept = _probabilities(
        table, mask, number, rows, like, EXPERTS, BLOCK, ROWS, MASKED, MIDDLE
    )
    expert = tl.arange(0, BLOCK)
    by = tl.load(slope + expert, mask=expert < EXPERTS, other=0.0)[None, :]
    gradient = kept[:, None] * p * (by - tl.sum(p * by, axis=1)[:, None])
    here = out + layer.to(tl.int64) * rows * EXPERTS + place
    tl.store(here, gradient.to(out.dtype.element_ty), mask=inside)

"""Rotary embedding in Triton: one pass forward and one backward, query and key in one launch.

`veomni_hook.kernels.rotary.device` has the formula; for each variant, `veomni_hook.kernels.rotary.forms`
defines the positions of couples and their cos and sin. The gradient of a rotation is the inverse rotation, so
one kernel computes both. Products and sums are rounded one by one and
never contracted, so results and gradients are bitwise equal to the reference's (complex tables: within
rounding). Upstream sources of ``*_fp32_as_query`` round gradients in two ways, one of which is the
reference's. Batch-invariant: a row's bits depend only on that row.

Shapes: q, k ``[batch, heads, length, head_dim]`` (``unsqueeze_dim`` 1) or ``[batch, length, heads,
head_dim]`` (2), with or without batch; cos, sin ``[batch or 1, length, width]``. Operands may have any
strides if the last dimension is contiguous. The memory order of results is batch, length, heads if the
query's positions are further apart than its heads (as after projections), else batch, heads, length.
Gradients have the order of results, whatever order they arrive in.
Saved: cos, sin. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from math import gcd
from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.rotary import device, signatures
from veomni_hook.kernels.rotary.forms import Form
from veomni_hook.kernels.rotary.variants import FUSED
from veomni_hook.kernels.shared.autograd import applied
from veomni_hook.kernels.shared.launch import LAUNCHES, TL, Launch, cdiv, power
from veomni_hook.kernels.shared.operand_checks import wants_grad
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import dense_rows

Tensor = torch.Tensor

_FORMS = {fused.form for fused in FUSED.values()}
#: Numbers rotated per program and per warp. On an H200, 8192 and 1024 took 8 % more time for pairs
#: and in float32, and 12 % for heads of 80; 1024 and 256 took up to 39 % more.
_TILE, _A_WARPS_ELEMENTS = 2048, 512
#: Heads per program; tables are read once for all of them. If positions are adjacent in memory on one side
#: and heads on the other, both sides access pieces of eight rows.
_HEADS, _HEADS_CROSSED = 32, 8


class _Way(NamedTuple):
    """One direction of a rotation, as passed to the operator.

    Attributes:
        code: as numbers: the heads dimension; the numbers of rotated columns and of columns before them;
            whether positions of the result are further apart than heads; and the form's steps: pairs_in,
            pairs_out, table, inverse rotation, the members' sin columns swapped.
        middle: the dtype to which products and their sum are rounded.
        out: the dtype of the result.
    """

    code: list[int]
    middle: torch.dtype
    out: torch.dtype


def _steps(form: Form, x: torch.dtype, table: torch.dtype) -> tuple[_Way, _Way]:
    """Return how ``x`` rotates by ``cos`` and ``sin`` of dtype ``table``, and its gradient: the form's steps.

    A gradient rotates in the other direction, ``dx1 = dy1*cos1 + dy2*sin2, dx2 = dy2*cos2 - dy1*sin1``, from
    the positions of results to those of inputs.
    """
    compute = torch.float32 if form.wide else torch.promote_types(x, table)
    there = (form.pairs_in, form.pairs_out, form.table, form.backwards, False)
    back = (form.pairs_out, form.pairs_in, form.table, not form.backwards, True)
    forward = _Way([*map(int, there)], compute, x if form.cast else compute)
    return forward, _Way([*map(int, back)], compute if form.together else x, x)


_STEPS = {(form, x, table): _steps(form, x, table) for form in _FORMS for x in TL for table in TL}


def _strides(strides: tuple[int, ...], heads_at: int) -> tuple[int, int, int]:
    """The strides of batch, positions and heads, of all strides."""
    of_positions = strides[2 * len(strides) - 5 - heads_at]
    return strides[0] if len(strides) == 4 else 0, of_positions, strides[heads_at]


def _results(
    cos: Tensor, sin: Tensor, xs: Sequence[Tensor], code: Sequence[int], middle: torch.dtype, out: torch.dtype
) -> list[Tensor]:
    """Allocate a result with the shape of each of ``xs``, with positions or heads as the outer dimension."""
    results = []
    for x in xs:
        *batch, before, after, width = x.shape
        # Whichever of the two comes first in the shape, the outer one spans a whole row of the other.
        first_outside = (code[0] == len(batch)) != bool(code[3])
        apart = (after * width, width) if first_outside else (width, before * width)
        strides = *(before * after * width for _ in batch), *apart, 1
        results.append(torch.empty_strided(x.shape, strides, dtype=out, device=x.device))
    return results


@operator(_results)
def _rotary(
    cos: Tensor, sin: Tensor, xs: Sequence[Tensor], code: Sequence[int], middle: torch.dtype, out: torch.dtype
) -> list[Tensor]:
    cos, sin = dense_rows(cos), dense_rows(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    inputs, results = [dense_rows(x) for x in xs], _results(cos, sin, xs, code, middle, out)
    # One or two tensors; one alone is both.
    q, k, q_out, k_out = inputs[0], inputs[-1], results[0], results[-1]
    if 0 in q.shape and 0 in k.shape:
        return results
    launch, grid, numbers = _launch_plan(
        q.device, (q.dtype, cos.dtype, q_out.dtype, middle), (q.shape, k.shape, cos.shape),
        (q.stride(), k.stride(), q_out.stride(), k_out.stride(), cos.stride()), tuple(code), len(xs) == 1,
    )  # fmt: skip
    launch(grid, q, k, q_out, k_out, cos, sin, *numbers)
    return results


@lru_cache(maxsize=LAUNCHES)
def _launch_plan(
    on: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    code: tuple[int, ...],
    alone: bool,
) -> tuple[Launch, tuple[int, int, int], tuple[int, ...]]:
    """Return the launcher, the grid and the numbers after the tensors, for everything that they depend on.

    Args:
        on: where it runs.
        dtypes: of q, cos, the results and sums.
        shapes: of q, k and cos.
        strides: of q, k, both results and cos.
        code: `_Way.code`.
        alone: there is no k; q stands for it.
    """
    heads_at, rotated, offset, _, *form = code
    (q, k, cos), table = shapes, strides[4]
    of_q, of_k, of_q_out, of_k_out = (_strides(stride, heads_at) for stride in strides[:4])
    length, q_heads, k_heads = cos[-2], q[heads_at], 0 if alone else k[heads_at]
    couples, rest = rotated // 2, q[-1] - rotated
    block, rest_block = power(couples), power(rest) if rest else 0
    # A program rotates a tile: some positions of some heads.
    row = power(2 * block + rest_block)
    rows = max(1, _TILE // row)
    crossed = of_q[1] < of_q[2] or of_q_out[1] < of_q_out[2]
    inside = min(rows, power(max(q_heads, k_heads)), _HEADS_CROSSED if crossed else _HEADS)
    positions, warps = rows // inside, max(1, min(16, rows * row // _A_WARPS_ELEMENTS))
    q_inside, k_inside = (max(1, min(inside, power(heads))) for heads in (q_heads, k_heads))
    # Of the programs that share a block of positions, the first ones have the query.
    q_shares = cdiv(q_heads, q_inside)
    shares, blocks = q_shares + cdiv(k_heads, k_inside), cdiv(length, positions)
    numbers = (
        length, blocks, q_heads, k_heads, q_shares, shares, *of_q, *of_k, *of_q_out, *of_k_out,
        table[0] if len(table) == 3 and cos[0] > 1 else 0, table[-2],
    )  # fmt: skip
    rest_at = 0 if offset else rotated
    sizes = couples, block, offset, rest, rest_at, rest_block, positions, q_inside, k_inside
    constants = *sizes, *form, TL[dtypes[3]], gcd(16, *numbers[6:])
    launch = Launch(device.rotate, 6, *constants, num_warps=warps, enable_fp_fusion=False)
    return launch, (shares * blocks * (q[0] if len(q) == 4 else 1), 1, 1), numbers


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, ways: tuple[_Way, _Way], *xs: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.ways = ways
        ctx.set_materialize_grads(False)
        return tuple(_rotary(cos, sin, list(xs), *ways[0]))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        (cos, sin), (there, back) = ctx.saved_tensors, ctx.ways
        incoming = [dy for dy in dys if dy is not None]
        turned = iter(_turned(cos, sin, (back, there), incoming) if incoming else ())
        return None, None, None, *(None if dy is None else next(turned) for dy in dys)


_apply = applied(_Rotary, data=3)


def _turned(cos: Tensor, sin: Tensor, ways: tuple[_Way, _Way], xs: Sequence[Tensor]) -> Sequence[Tensor]:
    if wants_grad(*xs):
        return _apply(cos, sin, ways, *xs)  # type: ignore[no-any-return]
    return _rotary(cos, sin, list(xs), *ways[0])


def _rotate(form: Form, xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, heads_at: int) -> Sequence[Tensor]:
    """Rotate ``xs`` by tables without heads."""
    x = xs[0]
    rotated = cos.shape[-1] * form.ratio
    offset = x.shape[-1] - rotated if form.reach == "trailing" else 0
    outside = x.stride(2 * x.ndim - 5 - heads_at) >= x.stride(heads_at)
    ahead, behind = _STEPS[form, x.dtype, cos.dtype]
    place = heads_at, rotated, offset, outside
    there, back = _Way([*place, *ahead[0]], *ahead[1:]), _Way([*place, *behind[0]], *behind[1:])
    if len(xs) > 1 and torch.is_grad_enabled() and xs[0].requires_grad is not xs[1].requires_grad:
        # One call per tensor, so that a frozen one gets no gradient and its result requires none.
        return [_turned(cos, sin, (there, back), (tensor,))[0] for tensor in xs]
    return _turned(cos, sin, (there, back), xs)


kernel = partial(signatures.kernel, _rotate)

"""RMSNorm in Triton: one pass forward, one pass backward, and a sum of partial weight gradients.

`veomni_hook.kernels.rms_norm.device` has the formulas (Zhang and Sennrich, Root Mean Square Layer
Normalization, 2019). Variants differ in ``factor`` (1, weight, 1 + weight), in the dtype ``middle`` to which
``xhat`` is rounded first, and in the result's dtype. Gradients are accumulated in float32. Results are
deterministic: programs have fixed rows, and there are no atomics. Result and dx are batch-invariant: nothing
depends on the number of rows. (A tensor not aligned to 16 bytes, such as a slice, is compiled separately and
may be summed in another order.)

Measured on one H200 (`veomni-hook bench`, `benchmarks/results/bench-cuda.json`, share of a copy's bandwidth,
bfloat16): 98 % both ways at 4096 and 128 columns, 97 % backward at 12288, in two blocks (`tiles.split`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from veomni_hook.kernels.rms_norm import device as kernels
from veomni_hook.kernels.rms_norm import wide_device
from veomni_hook.kernels.rms_norm.tiles import (
    DTYPES,
    LARGE,
    MOST_COLUMNS,
    NONE,
    ONE_PLUS,
    ONE_PLUS_ROUNDED,
    TL,
    WEIGHT,
    WIDE_WARPS,
    backward_tile,
    forward_tile,
    room,
    split,
    stages_of,
    summed,
    warps_of,
    wide,
)
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, power
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.operators import define_op
from veomni_hook.kernels.shared.rows import Rows, readable

__all__ = [
    "BACKWARD",
    "FORWARD",
    "cast_before_weight",
    "cast_to_weight",
    "one_plus_weight",
    "one_plus_weight_rounded",
    "refuses",
    "refuses_unweighted",
    "unweighted",
    "weight_before_cast",
]


# Launchers, cached by all Triton specialisations; `large`: row numbers do not fit into 32 bits.
@lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    columns: int,
    x_rows: Rows,
    form: tuple[int, torch.dtype],
    *,
    large: bool,
) -> tuple[Launch, int]:
    """Return the forward's launcher, and the rows per program."""
    block = power(columns)
    tile = forward_tile(columns)
    factor, middle = form
    constants = columns, block, tile // block, factor, TL[middle]
    return Launch(kernels.forward, 4, *constants, num_warps=warps_of(tile)), tile // block


@lru_cache(maxsize=LAUNCHES)
def _backward_launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    columns: int,
    where: tuple[Rows, ...],
    form: tuple[int, torch.dtype],
    *,
    to_weight: bool,
    large: bool,
) -> tuple[Launch, int, int]:
    """Return the backward's launcher, the rows per program and step, and the maximum number of programs.

    Args:
        device: where it runs.
        dtypes: those of x, dy and the weight.
        columns: the length of a row.
        where: the rows of x, of dy and, if there is one, of a gradient of the dtype of x that is added to dx.
        form: the factor, and the dtype to which ``xhat`` is rounded.
        to_weight: whether the weight's gradient is wanted.
        large: row numbers do not fit into 32 bits.
    """
    processors, memory = room(device)
    x, dy, weight = dtypes
    added = len(where) > 2
    factor, middle = form
    steps = factor, TL[middle], added, to_weight
    chunked = wide(columns, x.itemsize + dy.itemsize + weight.itemsize, memory)
    if chunked is not None:
        constants = columns, chunked.head, chunked.tail, chunked.chunk, *steps, chunked.stages
        return Launch(wide_device.backward, 7, *constants, num_warps=WIDE_WARPS), 1, processors
    tile = backward_tile(columns)
    rows = tile // power(columns)
    head, tail = split(columns)
    loaded = x.itemsize + dy.itemsize + (x.itemsize if added else 0)
    stages = stages_of(rows * (head + tail), rows * columns, loaded, memory)
    constants = columns, head, tail, rows, *steps, stages
    return Launch(kernels.backward, 7, *constants, num_warps=warps_of(tile)), rows, processors


def _forward_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    factor: int,
    middle: torch.dtype,
    out: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, x_rows = readable(x)
    device, shape = x.device, x.shape
    columns = shape[-1]
    y = torch.empty(shape, dtype=out, device=device)
    scale = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    rows = scale.numel()
    if not columns or not rows:
        return y, scale
    if weight is None:
        weight = x  # a placeholder that the kernel does not access
    launch, size = _forward_launch(
        device, (x.dtype, weight.dtype, out), columns, x_rows, (factor, middle), large=rows >= LARGE
    )
    launch((-(-rows // size), 1, 1), x, weight, y, scale, rows, *x_rows, float(eps))
    return y, scale


def _backward_op(  # noqa: PLR0913, PLR0917 - the op's schema
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    dy: torch.Tensor,
    direct: torch.Tensor | None,
    factor: int,
    middle: torch.dtype,
    to_weight: bool,  # noqa: FBT001
) -> tuple[torch.Tensor, torch.Tensor]:
    x, x_rows = readable(x)
    dy, dy_rows = readable(dy)
    where: tuple[Rows, ...] = x_rows, dy_rows
    # The kernel does not access placeholders: dy for a gradient to add, x for the weight, scale for partial.
    if direct is None:
        direct, direct_rows = dy, dy_rows
    else:
        direct, direct_rows = readable(direct)
        where = x_rows, dy_rows, direct_rows
    if weight is None:
        weight = x
    device, shape = x.device, x.shape
    columns, rows = shape[-1], scale.numel()
    dx = torch.empty(shape, dtype=x.dtype, device=device)
    if not columns or not rows:
        return dx, torch.zeros(columns if to_weight else 0, dtype=weight.dtype, device=device)
    launch, size, programs = _backward_launch(
        device, (x.dtype, dy.dtype, weight.dtype), columns, where, (factor, middle),
        to_weight=to_weight, large=rows >= LARGE,
    )  # fmt: skip
    programs = min(programs, -(-rows // size))
    partial = torch.empty((programs, columns), dtype=torch.float32, device=device) if to_weight else scale
    launch(
        (programs, 1, 1), x, weight, scale, dy, direct, dx, partial, rows, *x_rows, *dy_rows, *direct_rows
    )  # fmt: skip
    if to_weight:
        return dx, summed(partial, weight.dtype)
    return dx, torch.empty(0, dtype=weight.dtype, device=device)


def _forward_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    factor: int,
    middle: torch.dtype,
    out: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=out), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _backward_fake(  # noqa: PLR0913, PLR0917 - the op's schema
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    dy: torch.Tensor,
    direct: torch.Tensor | None,
    factor: int,
    middle: torch.dtype,
    to_weight: bool,  # noqa: FBT001
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = x.dtype if weight is None else weight.dtype
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:] if to_weight else 0, dtype=dtype)


FORWARD = define_op(
    "rms_norm(Tensor x, Tensor? weight, float eps, int factor, ScalarType middle, ScalarType out)"
    " -> (Tensor, Tensor)",
    _forward_op,
    _forward_fake,
)
BACKWARD = define_op(
    "rms_norm_backward(Tensor x, Tensor? weight, Tensor scale, Tensor dy, Tensor? direct, int factor,"
    " ScalarType middle, bool to_weight) -> (Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        factor: int,
        middle: torch.dtype,
        out: torch.dtype,
    ) -> torch.Tensor:
        y, scale = FORWARD(x, weight, eps, factor, middle, out)
        ctx.save_for_backward(x, weight, scale)
        ctx.form = factor, middle
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        to_x, to_weight = ctx.needs_input_grad[:2]
        dx, dweight = BACKWARD(x, weight, scale, dy, None, *ctx.form, to_weight)
        return dx if to_x else None, dweight if to_weight else None, None, None, None, None


def cast_before_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, where ``xhat`` has the dtype of ``hidden_states`` ``[..., hidden]``."""
    out = torch.promote_types(hidden_states.dtype, weight.dtype)
    return _norm(hidden_states, weight, eps, WEIGHT, hidden_states.dtype, out)


def weight_before_cast(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, both in float32, in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, weight, eps, WEIGHT, torch.float32, hidden_states.dtype)


def cast_to_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, where ``xhat`` has the dtype of ``weight`` ``[hidden]``."""
    return _norm(hidden_states, weight, eps, WEIGHT, weight.dtype, weight.dtype)


def one_plus_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``(1 + weight) * xhat`` in float32, in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, weight, eps, ONE_PLUS, torch.float32, hidden_states.dtype)


def one_plus_weight_rounded(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`one_plus_weight` with ``1 + weight`` rounded to the dtype of ``weight``."""
    return _norm(hidden_states, weight, eps, ONE_PLUS_ROUNDED, torch.float32, hidden_states.dtype)


def unweighted(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``xhat`` in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, None, eps, NONE, torch.float32, hidden_states.dtype)


def _norm(*call: Any) -> torch.Tensor:
    return _RmsNorm.apply(*call)  # type: ignore[no-any-return, no-untyped-call]


def refuses(owner: Any, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = not_plain(weight) or refuses_unweighted(owner, hidden_states, eps)
    if reason is not None:
        return reason
    if weight.dtype not in DTYPES:
        return f"the weight has dtype {weight.dtype}"
    if weight.device != hidden_states.device:
        return f"the weight is on {weight.device}, the input on {hidden_states.device}"
    if hidden_states.shape[-1:] != weight.shape:
        return "the weight does not match the last dimension of the input"
    if not weight.is_contiguous():
        return "the weight is not contiguous"
    return None


def refuses_unweighted(owner: Any, hidden_states: torch.Tensor, eps: float) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = not_plain(hidden_states) or untraceable()
    if reason is not None:
        return reason
    if hidden_states.layout is not torch.strided:
        return "the input is not a strided tensor"
    if hidden_states.dtype not in DTYPES:
        return f"upstream computes {hidden_states.dtype} input in float32"
    if not isinstance(eps, (float, int)):
        return f"eps is a {type(eps).__name__}"
    if not hidden_states.ndim or hidden_states.shape[-1] > MOST_COLUMNS:
        return f"the kernel supports rows of at most {MOST_COLUMNS} values"
    return None

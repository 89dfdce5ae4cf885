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

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod

import torch

from veomni_hook.kernels.rms_norm import device as kernels
from veomni_hook.kernels.rms_norm import reference, wide_device
from veomni_hook.kernels.rms_norm.tiles import (
    LARGE,
    MOST_COLUMNS,
    NONE,
    ONE_PLUS,
    ONE_PLUS_ROUNDED,
    WEIGHT,
    Plan,
    backward_tile,
    fetches,
    plan_of_rows,
    split,
    stages_of,
    summed,
    warps_of,
    wide,
)
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, TL, cdiv, launch_of, power, room
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain, untraceable
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import contiguous_strides, readable, rows_at

__all__ = [
    "cast_before_weight",
    "cast_to_weight",
    "one_plus_weight",
    "one_plus_weight_rounded",
    "refuses",
    "refuses_unweighted",
    "rms_norm",
    "rms_norm_backward",
    "unfit",
    "unweighted",
    "weight_before_cast",
]


@lru_cache(maxsize=LAUNCHES)
def _forward_plan(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shape: torch.Size,
    strides: tuple[int, ...],
    form: tuple[int, torch.dtype],
    keep: bool,
) -> Plan | None:
    """Return the plan for x of these strides, or None if it must be copied first."""
    factor, middle = form
    kept = tuple(shape[:-1])
    return plan_of_rows(
        kernels.forward, (device, dtypes), shape, (strides,), kept, 4, factor, TL[middle], keep
    )


@lru_cache(maxsize=LAUNCHES)
def _backward_plan(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shape: torch.Size,
    strides: tuple[tuple[int, ...], ...],
    form: tuple[int, torch.dtype],
    added: bool,
    to_weight: bool,
) -> Plan | None:
    """Return the backward's plan, or None if x, dy or the gradient that is added must be copied first.

    Args:
        device: where it runs.
        dtypes: those of x, dy and the weight.
        shape: of x.
        strides: those of x, dy and the gradient of the dtype of x that is added to dx.
        form: the factor, and the dtype to which ``xhat`` is rounded.
        added: whether there is a gradient to add.
        to_weight: whether the weight's gradient is wanted.
    """
    places = [place for place in (rows_at(shape, stride) for stride in strides) if place is not None]
    if len(places) < len(strides):
        return None
    columns, rows = shape[-1], prod(shape[:-1])
    like = strides[0] == contiguous_strides(shape)
    if not columns or not rows:
        return Plan(None, (0, 0, 0), (), ((), ()), like)
    kind = device, dtypes, *(places if added else places[:2]), rows >= LARGE
    steps = form[0], TL[form[1]], added, to_weight
    processors, memory = room(device)
    x, dy, _ = dtypes
    parts = wide(columns, max(x.itemsize, dy.itemsize), fetched=fetches(device))
    if parts is not None:
        size, blocks = 1, (columns, parts.block, parts.parts, parts.lines)
        launch = launch_of(kind, wide_device.backward, 7, *blocks, *steps, num_warps=parts.warps)
    else:
        tile = backward_tile(columns)
        size = tile // power(columns)
        head, tail = split(columns)
        loaded = x.itemsize + dy.itemsize + (x.itemsize if added else 0)
        stages = stages_of(size * (head + tail), size * columns, loaded, memory)
        constants = columns, head, tail, size, *steps, stages
        launch = launch_of(kind, kernels.backward, 7, *constants, num_warps=warps_of(tile))
    programs = min(processors, cdiv(rows, size))
    numbers = rows, *(number for place in places for number in place)
    return Plan(launch, (programs, 1, 1), numbers, ((programs, columns), (columns, 1)), like)


@operator(
    lambda x, weight, eps, factor, middle, out: (
        x.new_empty(x.shape, dtype=out),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    )
)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    factor: int,
    middle: torch.dtype,
    out: torch.dtype,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x, and the scale of each row, which only a backward reads.

    Args:
        x: ``[..., hidden]``.
        weight: ``[hidden]``, or None for 1.
        eps: added to the mean square.
        factor: WEIGHT, ONE_PLUS, ONE_PLUS_ROUNDED or NONE (`tiles`).
        middle: the dtype to which ``xhat`` is rounded.
        out: the dtype of the norm.
        keep: whether to return the scale.
    """
    if weight is None:
        weight = x  # a placeholder that the kernel does not access
    device, shape, dtype = x.device, x.shape, x.dtype
    plan = _forward_plan(
        device, (dtype, weight.dtype, out), shape, x.stride(), (factor, middle), keep
    )  # fmt: skip
    if plan is None:
        x = x.contiguous()
        plan = _forward_plan(device, (dtype, weight.dtype, out), shape, x.stride(), (factor, middle), keep)
        assert plan is not None  # noqa: S101
    launch, grid, numbers, scales, like = plan
    # The fastest of torch's functions for each; `torch.empty` of a `torch.Size` takes three times as long.
    y = torch.empty_like(x) if like and out is dtype else torch.empty(shape, dtype=out, device=device)
    scale = torch.empty_strided(*scales, dtype=torch.float32, device=device) if keep else y
    if launch is not None:
        launch(grid, x, weight, y, scale, *numbers, float(eps))
    return y, scale


@operator(
    lambda x, weight, scale, dy, direct, factor, middle, to_weight: (
        x.new_empty(x.shape),
        (x if weight is None else weight).new_empty(x.shape[-1:] if to_weight else 0),
    )
)
def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    dy: torch.Tensor,
    direct: torch.Tensor | None,
    factor: int,
    middle: torch.dtype,
    to_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight, which is empty unless ``to_weight``.

    ``scale`` is what the forward kept; ``direct`` is another gradient of x, of its dtype, that is added.
    """
    added = direct is not None
    # The kernel does not access placeholders: dy for a gradient to add, x for the weight, scale for partial.
    direct = dy if direct is None else direct
    weight = x if weight is None else weight
    device, shape, dtype = x.device, x.shape, x.dtype
    kind = device, (dtype, dy.dtype, weight.dtype), shape
    form = (factor, middle), added, to_weight
    plan = _backward_plan(*kind, (x.stride(), dy.stride(), direct.stride()), *form)
    if plan is None:
        x, dy, direct = readable(x)[0], readable(dy)[0], readable(direct)[0]
        plan = _backward_plan(*kind, (x.stride(), dy.stride(), direct.stride()), *form)
        assert plan is not None  # noqa: S101
    launch, grid, numbers, kept, like = plan
    dx = torch.empty_like(x) if like else torch.empty(shape, dtype=dtype, device=device)
    if launch is None:
        return dx, torch.zeros(shape[-1] if to_weight else 0, dtype=weight.dtype, device=device)
    parts = torch.empty_strided(*kept, dtype=torch.float32, device=device) if to_weight else scale
    launch(grid, x, weight, scale, dy, direct, dx, parts, *numbers)
    if to_weight:
        return dx, summed(parts, weight.dtype)
    return dx, torch.empty(0, dtype=weight.dtype, device=device)


def _formula(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    factor: int,
    middle: torch.dtype,
    out: torch.dtype,
) -> torch.Tensor:
    xhat = reference.unweighted(x.float(), eps).to(middle)
    if weight is None:
        return xhat.to(out)
    scale = weight if factor == WEIGHT else 1 + weight if factor == ONE_PLUS_ROUNDED else 1 + weight.float()
    return (scale * xhat).to(out)


#: Takes x, weight, eps, the factor, the dtypes of ``xhat`` and of the result.
_norm: Callable[..., torch.Tensor] = differentiable(
    rms_norm,
    lambda saved, rest, wanted, dy: rms_norm_backward(*saved, dy, None, *rest[1:3], wanted[1]),
    _formula,
    tensors=2,
    direct={"keep": False},
)


def cast_before_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, where ``xhat`` has the dtype of ``hidden_states`` ``[..., hidden]``."""
    out = torch.promote_types(hidden_states.dtype, weight.dtype)
    return _norm(hidden_states, weight, eps, WEIGHT, hidden_states.dtype, out)


def _in_float32(factor: int, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the factor times ``xhat``, both in float32, in the dtype of ``hidden_states``."""
    return _norm(hidden_states, weight, eps, factor, torch.float32, hidden_states.dtype)


#: Return ``weight * xhat``, or ``(1 + weight) * xhat``, the last with ``1 + weight`` rounded to the dtype of
#: ``weight``; in the dtype of ``hidden_states`` ``[..., hidden]``.
weight_before_cast = partial(_in_float32, WEIGHT)
one_plus_weight = partial(_in_float32, ONE_PLUS)
one_plus_weight_rounded = partial(_in_float32, ONE_PLUS_ROUNDED)


def cast_to_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, where ``xhat`` has the dtype of ``weight`` ``[hidden]``."""
    return _norm(hidden_states, weight, eps, WEIGHT, weight.dtype, weight.dtype)


def unweighted(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``xhat`` in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, None, eps, NONE, torch.float32, hidden_states.dtype)


def refuses(owner: object, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
    """Return why this call must run the upstream code, or None."""
    # One function, because each call takes time: guards of other ops ask this, too.
    reason = not_plain(weight, hidden_states) or untraceable()
    return reason if reason is not None else unfit(hidden_states, weight, eps)


def unfit(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
    """Return why the kernels cannot take these plain tensors, or None."""
    shape = hidden_states.shape
    if (
        hidden_states.dtype in DTYPES
        and weight.dtype in DTYPES
        and hidden_states.layout is torch.strided
        and type(eps) is float
        and shape
        and shape[-1] <= MOST_COLUMNS
        and weight.device == hidden_states.device
        and weight.shape == (shape[-1],)
        and weight.is_contiguous()
    ):
        return None
    return _unfit_input(hidden_states, eps) or _unfit_weight(hidden_states, weight)


def _unfit_weight(hidden_states: torch.Tensor, weight: torch.Tensor) -> str | None:
    if weight.dtype not in DTYPES:
        return f"the weight has dtype {weight.dtype}"
    if weight.device != hidden_states.device:
        return f"the weight is on {weight.device}, the input on {hidden_states.device}"
    if hidden_states.shape[-1:] != weight.shape:
        return "the weight does not match the last dimension of the input"
    if not weight.is_contiguous():
        return "the weight is not contiguous"
    return None


def refuses_unweighted(owner: object, hidden_states: torch.Tensor, eps: float) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = not_plain(hidden_states) or untraceable()
    return reason if reason is not None else _unfit_input(hidden_states, eps)


def _unfit_input(hidden_states: torch.Tensor, eps: float) -> str | None:
    if hidden_states.layout is not torch.strided:
        return "the input is not a strided tensor"
    if hidden_states.dtype not in DTYPES:
        return f"upstream computes {hidden_states.dtype} input in float32"
    if not isinstance(eps, (float, int)):
        return f"eps is a {type(eps).__name__}"
    if not hidden_states.ndim or hidden_states.shape[-1] > MOST_COLUMNS:
        return f"the kernel supports rows of at most {MOST_COLUMNS} values"
    return None

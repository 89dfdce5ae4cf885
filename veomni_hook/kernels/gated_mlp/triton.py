"""Gated activations in Triton: one pass forward, one pass backward.

Forward:  y = a * u, where a = activation(gate) and u = up, or clamped as the variant defines
Backward: du = dy * a,  dgate = (dy * u) * activation'(gate); a is recomputed
Shapes: gate, up, y ``[..., intermediate]``, one dtype. Rows may have any stride, so both may be halves of one
projection. Saved: gate, up; the projection of y saves nothing more (`recomputed`). Mutates: nothing that
others can read; the backward of that projection lets gradients take the place of gate and up, and y of dy.
Every step is rounded as in upstream's operators; exp and quotients use the device's fast versions, a few ulp
of float32 away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
import triton.language as tl

from veomni_hook.kernels.gated_mlp import device, reference
from veomni_hook.kernels.gated_mlp.recomputed import Origin, Rule, product_of
from veomni_hook.kernels.shared.activations import (
    FUNCTIONS,
    POWERS,
    name_of,
    name_of_accepted,
    unknown,
    widened,
)
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, STEPS, TL, Launch
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import Rows, readable, rows_at

__all__ = [
    "ACTIVATIONS",
    "Plan",
    "clamped",
    "clamped_after",
    "plan_of",
    "product",
    "product_float32",
    "refuses",
    "scaled_sigmoid",
]

Tensor = torch.Tensor
Activation = Callable[[Tensor], Tensor]

_PRODUCT, _CLAMPED, _CLAMPED_AFTER, _SCALED_SIGMOID = range(4)
#: By form, and whether all is in float32.
_FORMULAS: dict[tuple[int, int], Callable[..., Tensor]] = {
    (_PRODUCT, False): reference.product,
    (_PRODUCT, True): reference.product_float32,
    (_CLAMPED, False): reference.clamped,
    (_CLAMPED_AFTER, False): reference.clamped_after,
}
_NAMES = (
    *("silu", "gelu_tanh", "gelu", "relu", "relu_squared", "sigmoid", "quick_gelu"),
    *("gelu_tanh_cubed", "gelu_tanh_factored"),
)
#: The device code's activation numbers, by name.
ACTIVATIONS = {name: number for number, name in enumerate(_NAMES)}
# Elements and warps per program.
_FORWARD_BLOCK, _FORWARD_WARPS = 4096, 8
_BACKWARD_BLOCK, _BACKWARD_WARPS = 2048, 8


class _Call(NamedTuple):
    """A formula: its number, its activation's number, whether all is in float32; limit and alpha."""

    code: tuple[int, int, bool]
    numbers: tuple[float, float]


class Plan(NamedTuple):
    """How a call is launched: the arguments after the tensors (``sizes``) and at the end (``rows``)."""

    launch: Launch
    grid: tuple[int, int, int]
    sizes: tuple[int, int]
    rows: tuple[int, ...]


@lru_cache(maxsize=LAUNCHES)
def plan_of(
    on: torch.device,
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[tuple[int, ...], ...],
    code: tuple[int, int, bool],
    again: bool | None,
) -> Plan | None:
    """Return the plan for tensors of these strides, or None if one must be copied first.

    ``again`` is that of the backward; None for the forward. It depends on everything that Triton specialises
    on. Contiguous tensors are one row.
    """
    places = [rows_at(shape, stride) for stride in strides]
    if any(place is None for place in places):
        return None
    rows = [place for place in places if place is not None]
    number, columns = prod(shape), shape[-1]
    if all(row == Rows(1, 1, columns, 0, 0) for row in rows):
        rows, columns = [Rows(1, 1, 0, 0, 0)] * len(rows), number
    form, activation, wide = code
    block, warps = (_FORWARD_BLOCK, _FORWARD_WARPS) if again is None else (_BACKWARD_BLOCK, _BACKWARD_WARPS)
    constants = block, form, activation, tl.float32 if wide else TL[dtype]
    if again is None:
        launch = Launch(device.forward, 3, *constants, num_warps=warps, **STEPS)
    else:
        launch = Launch(device.backward, 6, *constants, again, num_warps=warps, **STEPS)
    blocks = -(-columns // block)
    grid = number // columns * blocks, 1, 1
    return Plan(launch, grid, (columns, blocks), tuple(number for row in rows for number in row))


def _like(x: Tensor) -> Tensor:
    """Return an empty contiguous tensor like ``x``."""
    # `torch.empty` of a `torch.Size` takes three times as long, and naming the format twice as long.
    return torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)


@operator(lambda gate, up, *call: gate.new_empty(gate.shape))
def _gated_mlp(gate: Tensor, up: Tensor, code: Sequence[int], numbers: Sequence[float]) -> Tensor:
    y = _like(gate)
    if 0 in gate.shape:
        return y
    kind = gate.device, gate.dtype, gate.shape
    form = tuple(code)
    plan = plan_of(*kind, (gate.stride(), up.stride()), form, None)
    if plan is None:
        gate, up = readable(gate)[0], readable(up)[0]
        plan = plan_of(*kind, (gate.stride(), up.stride()), form, None)
        assert plan is not None  # noqa: S101
    launch, grid, sizes, rows = plan
    launch(grid, gate, up, y, *sizes, *numbers, *rows)
    return y


@operator(
    lambda gate, up, dy, *call: (
        gate.new_empty(gate.shape),
        gate.new_empty(gate.shape),
        gate.new_empty(gate.shape if call[-1] else 0),
    )
)
def _gated_mlp_backward(
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
    code: Sequence[int],
    numbers: Sequence[float],
    again: bool,
    *,
    into: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    # Each element is read before the results are written in its place.
    places = into if again else (*into[:2], gate.new_empty(0))
    dgate, dup, y = (_like(gate) if place is None else place for place in places)
    if 0 in gate.shape:
        return dgate, dup, y
    kind = gate.device, gate.dtype, gate.shape
    form = tuple(code)
    plan = plan_of(*kind, (gate.stride(), up.stride(), dy.stride()), form, again)
    if plan is None:
        gate, up, dy = readable(gate)[0], readable(up)[0], readable(dy)[0]
        plan = plan_of(*kind, (gate.stride(), up.stride(), dy.stride()), form, again)
        assert plan is not None  # noqa: S101
    launch, grid, sizes, rows = plan
    launch(grid, gate, up, dy, dgate, dup, y, *sizes, *numbers, *rows)
    return dgate, dup, y


def _definition(gate: Tensor, up: Tensor, code: Sequence[int], numbers: Sequence[float]) -> Tensor:
    (form, number, wide), (limit, alpha) = code, numbers
    if form == _SCALED_SIGMOID:
        return reference.scaled_sigmoid(gate, up, alpha, limit)
    limits = () if form == _PRODUCT else (limit,)
    return _FORMULAS[form, wide](gate, up, FUNCTIONS[_NAMES[number]], *limits)


_product: Callable[..., Tensor] = differentiable(
    _gated_mlp,
    lambda saved, rest, wanted, dy: _gated_mlp_backward(*saved, dy, *rest, False)[:2],
    _definition,
    tensors=2,
)


def _gated(gate: Tensor, up: Tensor, call: _Call) -> Tensor:
    y = _product(gate, up, *call)
    if not y.requires_grad or torch.compiler.is_compiling():
        return y
    rule = Rule(
        lambda gate, up: _gated_mlp(gate, up, *call),
        partial(_both, call),
        lambda gate, up: _definition(gate, up, *call),
    )
    return product_of(y, Origin(gate, up, rule))


def _both(call: _Call, gate: Tensor, up: Tensor, dy: Tensor, spent: bool) -> tuple[Tensor, Tensor, Tensor]:
    places = (gate, up, dy) if spent else (None, None, dy)
    into = [None if place is None or not place.is_contiguous() else place.detach() for place in places]
    return _gated_mlp_backward(gate, up, dy, *call, True, into=into)


def _unusual(gate: Tensor, up: Tensor, *numbers: Any) -> bool:
    """Whether the projections returned operands that only the formula supports."""
    return (
        not_plain(gate, up) is not None
        or gate.dtype not in TL
        or gate.dtype is not up.dtype
        or gate.shape != up.shape
        or gate.device != up.device
        or not gate.ndim
        or (bool(numbers) and any(type(number) not in (int, float) or number < 0 for number in numbers))
    )


def _computed(
    form: int,
    wide: bool,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    limit: float | None = None,
) -> Tensor:
    """Return what the formula of a form returns; `refuses` has accepted the activation."""
    numbers = () if limit is None else (limit,)
    if _unusual(gate, up, *numbers):
        return _FORMULAS[form, wide](gate, up, activation, *numbers)
    name = name_of_accepted(activation)
    assert name is not None, unknown(activation)  # noqa: S101 - `refuses` was asked
    return _gated(gate, up, _Call((form, ACTIVATIONS[name], wide), (float(limit or 0.0), 0.0)))


#: Return ``activation(gate) * up``, the second in float32, in the dtype of ``gate``. The others take a limit:
#: of ``gate`` from above and ``up`` on both sides, or of the activation from above and ``up`` on both sides.
product = partial(_computed, _PRODUCT, False)
product_float32 = partial(_computed, _PRODUCT, True)
clamped = partial(_computed, _CLAMPED, False)
clamped_after = partial(_computed, _CLAMPED_AFTER, False)


def scaled_sigmoid(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)`` with both clamped at ``limit``."""
    if _unusual(gate, up, alpha, limit):
        return reference.scaled_sigmoid(gate, up, alpha, limit)
    return _gated(gate, up, _Call((_SCALED_SIGMOID, 0, False), (float(limit), float(alpha))))


def refuses(owner: object, x: Tensor, activation: object = torch.sigmoid) -> str | None:
    """Return why this call of the MLP ``owner`` must run the upstream code, or None.

    ``x`` is a tensor available before the projections. A guard without an activation means a sigmoid.
    """
    name = name_of(activation)
    if name not in ACTIVATIONS:
        return unknown(activation)
    if name in POWERS and widened(x):
        return "autocast computes the powers of this activation, and what follows, in float32"
    return not_plain(x) or untraceable()

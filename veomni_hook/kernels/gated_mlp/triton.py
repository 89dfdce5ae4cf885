"""Gated activations in Triton: one pass forward, one pass backward.

Forward:  y = a * u, where a = activation(gate) and u = up, or clamped as the variant defines
Backward: du = dy * a,  dgate = (dy * u) * activation'(gate); a is recomputed
Shapes: gate, up, y ``[..., intermediate]``, one dtype. Rows may have any stride, so both may be halves of one
projection. Saved: gate, up; the projection of y saves nothing more (`recomputed`). Mutates: nothing.
Every step is rounded as in upstream's operators; exp and quotients use the device's fast versions, a few ulp
of float32 away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from veomni_hook.kernels.gated_mlp import device, reference
from veomni_hook.kernels.gated_mlp.recomputed import Origin, product_of
from veomni_hook.kernels.shared.activations import name_of, unknown
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable, wants_grad
from veomni_hook.kernels.shared.operators import define_op
from veomni_hook.kernels.shared.rows import Rows, readable

__all__ = [
    "ACTIVATIONS",
    "clamped",
    "clamped_after",
    "product",
    "product_float32",
    "refuses",
    "scaled_sigmoid",
]

Tensor = torch.Tensor
Activation = Callable[[Tensor], Tensor]

_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PRODUCT, _CLAMPED, _CLAMPED_AFTER, _SCALED_SIGMOID = range(4)
#: The device code's activation numbers, by name.
ACTIVATIONS = {
    name: number
    for number, name in enumerate(
        ("silu", "gelu_tanh", "gelu", "relu", "relu_squared", "sigmoid", "quick_gelu")
    )
}
# Elements and warps per program.
_FORWARD_BLOCK, _FORWARD_WARPS = 4096, 8
_BACKWARD_BLOCK, _BACKWARD_WARPS = 2048, 8


class _Call(NamedTuple):
    """A formula: its number, its activation's number, whether all is in float32; limit and alpha."""

    code: list[int]
    numbers: list[float]


def _addressed(*xs: Tensor) -> tuple[list[Tensor], list[Rows], int]:
    """Tensors with their row layouts, and the columns of a row; contiguous ones are one row."""
    if all(x.is_contiguous() for x in xs):
        return [*xs], [Rows(1, 1, 0, 0, 0)] * len(xs), xs[0].numel()
    tensors, rows = zip(*map(readable, xs), strict=True)
    return [*tensors], [*rows], xs[0].shape[-1]


def _forward_op(gate: Tensor, up: Tensor, code: Sequence[int], numbers: Sequence[float]) -> Tensor:
    form, activation, wide = code
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        (gate, up), rows, columns = _addressed(gate, up)
        blocks = -(-columns // _FORWARD_BLOCK)
        device.forward[(y.numel() // columns * blocks,)](
            gate, up, y, columns, blocks, *numbers, *rows[0], *rows[1],
            _FORWARD_BLOCK, form, activation, tl.float32 if wide else _TL[gate.dtype],
            num_warps=_FORWARD_WARPS,
        )  # fmt: skip
    return y


def _backward_op(
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
    code: Sequence[int],
    numbers: Sequence[float],
    again: bool,  # noqa: FBT001 - the op's schema
) -> tuple[Tensor, Tensor, Tensor]:
    form, activation, wide = code
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    y = torch.empty(gate.shape if again else 0, dtype=gate.dtype, device=gate.device)
    if dgate.numel():
        (gate, up, dy), rows, columns = _addressed(gate, up, dy)
        blocks = -(-columns // _BACKWARD_BLOCK)
        device.backward[(dgate.numel() // columns * blocks,)](
            gate, up, dy, dgate, dup, y, columns, blocks, *numbers, *rows[0], *rows[1], *rows[2],
            _BACKWARD_BLOCK, form, activation, tl.float32 if wide else _TL[gate.dtype],
            again, num_warps=_BACKWARD_WARPS,
        )  # fmt: skip
    return dgate, dup, y


def _forward_fake(gate: Tensor, up: Tensor, *_: Any) -> Tensor:
    return gate.new_empty(gate.shape)


def _backward_fake(gate: Tensor, up: Tensor, dy: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    y = gate.new_empty(gate.shape if call[-1] else 0)
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), y


_FORWARD = define_op(
    "gated_mlp(Tensor gate, Tensor up, int[] code, float[] numbers) -> Tensor",
    _forward_op,
    _forward_fake,
)
_BACKWARD = define_op(
    "gated_mlp_backward(Tensor gate, Tensor up, Tensor dy, int[] code, float[] numbers, bool again)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, call: _Call) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.call = call
        return _FORWARD(gate, up, *call)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dgate, dup, _ = _BACKWARD(*ctx.saved_tensors, dy, *ctx.call, False)
        to_gate, to_up = ctx.needs_input_grad[:2]
        return dgate if to_gate else None, dup if to_up else None, None


def _gated(gate: Tensor, up: Tensor, call: _Call) -> Tensor:
    if wants_grad(gate, up):
        y: Tensor = _Gated.apply(gate, up, call)  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling():
            return y
        return product_of(y, Origin(gate, up, partial(_again, call), partial(_gradients, call)))
    return _FORWARD(gate, up, *call)  # type: ignore[no-any-return]


def _again(call: _Call, gate: Tensor, up: Tensor) -> Tensor:
    return _FORWARD(gate, up, *call)  # type: ignore[no-any-return]


def _gradients(call: _Call, gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _BACKWARD(gate, up, dy, *call, True)  # type: ignore[no-any-return]


def _unusual(gate: Tensor, up: Tensor, *numbers: Any) -> bool:
    """Whether the projections returned operands that only the formula supports."""
    return (
        not_plain(gate, up) is not None
        or gate.dtype not in _TL
        or gate.dtype is not up.dtype
        or gate.shape != up.shape
        or gate.device != up.device
        or not gate.ndim
        or any(type(number) not in (int, float) or number < 0 for number in numbers)
    )


def product(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return ``activation(gate) * up``; `refuses` has accepted the activation."""
    if _unusual(gate, up):
        return reference.product(gate, up, activation)
    return _gated(gate, up, _Call([_PRODUCT, _number(activation), False], [0.0, 0.0]))


def product_float32(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return ``activation(gate) * up``, computed in float32, in the dtype of ``gate``."""
    if _unusual(gate, up):
        return reference.product_float32(gate, up, activation)
    return _gated(gate, up, _Call([_PRODUCT, _number(activation), True], [0.0, 0.0]))


def clamped(gate: Tensor, up: Tensor, activation: Activation, limit: float) -> Tensor:
    """Return ``activation(gate) * up``, with ``gate`` clamped above at ``limit`` and ``up`` on both sides."""
    if _unusual(gate, up, limit):
        return reference.clamped(gate, up, activation, limit)
    return _gated(gate, up, _Call([_CLAMPED, _number(activation), False], [float(limit), 0.0]))


def clamped_after(gate: Tensor, up: Tensor, activation: Activation, limit: float) -> Tensor:
    """Return ``activation(gate) * up``, the activation clamped above at ``limit``, ``up`` on both sides."""
    if _unusual(gate, up, limit):
        return reference.clamped_after(gate, up, activation, limit)
    return _gated(gate, up, _Call([_CLAMPED_AFTER, _number(activation), False], [float(limit), 0.0]))


def scaled_sigmoid(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)`` with both clamped at ``limit``."""
    if _unusual(gate, up, alpha, limit):
        return reference.scaled_sigmoid(gate, up, alpha, limit)
    return _gated(gate, up, _Call([_SCALED_SIGMOID, 0, False], [float(limit), float(alpha)]))


def _number(activation: Activation) -> int:
    name = name_of(activation)
    assert name is not None, unknown(activation)  # noqa: S101 - `refuses` was asked
    return ACTIVATIONS[name]


def refuses(owner: Any, x: Tensor, activation: Any = torch.sigmoid) -> str | None:
    """Return why this call of the MLP ``owner`` must run the upstream code, or None.

    ``x`` is a tensor available before the projections. A guard without an activation means a sigmoid.
    """
    if name_of(activation) not in ACTIVATIONS:
        return unknown(activation)
    return not_plain(x) or untraceable()

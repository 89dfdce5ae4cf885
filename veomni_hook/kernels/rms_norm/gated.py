"""RMSNorm in Triton with a gate, in groups of columns, or with the weight applied before the norm.

`veomni_hook.kernels.rms_norm.gated_device` has the formulas. The gate's activation is recomputed in backward.
Everything is accumulated in float32, deterministically.

Saved: x, gate, weight, the scale of each row and group in float32. Mutates: nothing.
Batch-invariant, as `veomni_hook.kernels.rms_norm.triton`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.rms_norm import gated_device as kernels
from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.rms_norm import triton as plain
from veomni_hook.kernels.rms_norm.tiles import (
    LARGE,
    ONE_PLUS,
    ONE_PLUS_ROUNDED,
    WEIGHT,
    stages_of,
    summed,
    warps_of,
)
from veomni_hook.kernels.shared.activations import name_of, unknown
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, TL, Launch, cdiv, power, room
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import Rows, readable

__all__ = [
    "cast_before_weight_gated",
    "gate_before_norm",
    "gate_before_norm_grouped",
    "one_plus_weight_before_norm",
    "one_plus_weight_grouped",
    "refuses_gate_after",
    "refuses_gate_before",
    "refuses_grouped",
    "weight_before_cast_gated",
]

_GROUPED, _WEIGHT_BEFORE, _GATE_BEFORE, _GATE_AFTER = range(4)


class _Form(NamedTuple):
    """The steps of a variant, and their order.

    ``rounds``: ``xhat`` is cast to the dtype of x. ``rounds_product``: its product with the weight is cast to
    their promoted dtype. ``promotes``: the result has that dtype.
    """

    factor: int
    place: int
    silu: bool = True
    rounds: bool = False
    rounds_product: bool = False
    promotes: bool = False


_FORMS = {
    "weight before": _Form(ONE_PLUS_ROUNDED, _WEIGHT_BEFORE),
    "grouped": _Form(ONE_PLUS, _GROUPED),
    "rounded, silu": _Form(WEIGHT, _GATE_AFTER, rounds=True, rounds_product=True),
    "rounded, sigmoid": _Form(WEIGHT, _GATE_AFTER, silu=False, rounds=True, rounds_product=True),
    "silu": _Form(WEIGHT, _GATE_AFTER),
    "sigmoid": _Form(WEIGHT, _GATE_AFTER, silu=False),
    "gate before": _Form(WEIGHT, _GATE_BEFORE, rounds=True, promotes=True),
    "no gate before": _Form(WEIGHT, _GROUPED, rounds=True, promotes=True),
}
#: Activations of a gate after the norm.
_ACTIVATIONS = ("silu", "sigmoid")
# Elements per program and per warp. Measured on one H200, bfloat16, share of a copy's bandwidth: at 128
# columns, 256 per warp reach 100 % forward and 95 % backward (512: 88 and 69 %), at 4096 columns 94 %
# backward (512: 97 %).
_TILE = 2048
_A_WARPS_ELEMENTS, _A_WARPS_ELEMENTS_NARROW = 512, 256
_NARROW = 512


def _warps(tile: int, columns: int) -> int:
    return warps_of(tile, _A_WARPS_ELEMENTS_NARROW if columns <= _NARROW else _A_WARPS_ELEMENTS)


def _constants(name: str, dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    form = _FORMS[name]
    x, _, weight, *_ = dtypes
    middle = x if form.rounds else torch.float32
    inner = torch.promote_types(x, weight) if form.rounds_product else torch.float32
    return [form.factor, form.place, form.silu, TL[middle], TL[inner]]


# Launchers, cached by all Triton specialisations except the number of rows.
@lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    columns: int,
    where: tuple[Rows, ...],
    form: tuple[str, int],
    *,
    large: bool,
) -> tuple[Launch, int]:
    """Return the forward's launcher for a form and a number of groups, and the rows per program."""
    name, groups = form
    block = power(columns)
    tile = max(block, _TILE)
    constants = columns, groups, block, tile // block, *_constants(name, dtypes)
    return Launch(kernels.forward, 5, *constants, num_warps=_warps(tile, columns)), tile // block


@lru_cache(maxsize=LAUNCHES)
def _backward_launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    columns: int,
    where: tuple[Rows, ...],
    form: tuple[str, int],
    *,
    to_weight: bool,
    large: bool,
) -> tuple[Launch, int, int]:
    """Return the backward's launcher, the rows per program and step, and the maximum programs per group."""
    name, groups = form
    processors, memory = room(device)
    block = power(columns)
    tile = max(block, _TILE)
    x, gate, _, dy = dtypes
    size = x.itemsize + dy.itemsize + (gate.itemsize if _FORMS[name].place >= _GATE_BEFORE else 0)
    stages = stages_of(tile, tile // block * columns, size, memory)
    constants = columns, groups, block, tile // block, *_constants(name, dtypes), to_weight, stages
    launch = Launch(kernels.backward, 8, *constants, num_warps=_warps(tile, columns))
    return launch, tile // block, cdiv(processors, groups)


@operator(
    lambda x, gate, weight, eps, form, groups: (
        x.new_empty(x.shape, dtype=_out(form, x, weight)),
        x.new_empty((*x.shape[:-1], groups), dtype=torch.float32),
    )
)
def _rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    form: str,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, x_rows = readable(x)
    # Without a gate, the kernel gets x, which it does not access.
    gate, gate_rows = (x, x_rows) if gate is None else readable(gate)
    device, shape = x.device, x.shape
    y = torch.empty(shape, dtype=_out(form, x, weight), device=device)
    scale = torch.empty((*shape[:-1], groups), dtype=torch.float32, device=device)
    columns, rows = shape[-1] // groups, scale.numel() // groups
    if not x.numel():
        return y, scale
    launch, size = _forward_launch(
        device, (x.dtype, gate.dtype, weight.dtype), columns, (x_rows, gate_rows), (form, groups),
        large=rows >= LARGE,
    )  # fmt: skip
    launch((-(-rows // size), groups, 1), x, gate, weight, y, scale, rows, *x_rows, *gate_rows, float(eps))
    return y, scale


@operator(
    lambda x, gate, weight, scale, dy, form, to_weight: (
        x.new_empty(x.shape),
        x.new_empty(0) if gate is None else gate.new_empty(x.shape),
        weight.new_empty(x.shape[-1:] if to_weight else 0),
    )
)
def _rms_norm_gated_backward(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dy: torch.Tensor,
    form: str,
    to_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, x_rows = readable(x)
    gated = gate is not None
    # Without a gate, the kernel gets x, which it does not access.
    gate, gate_rows = (x, x_rows) if gate is None else readable(gate)
    dy, dy_rows = readable(dy)
    device, shape, groups = x.device, x.shape, scale.shape[-1]
    dx = torch.empty(shape, dtype=x.dtype, device=device)
    dgate = torch.empty(shape if gated else 0, dtype=gate.dtype, device=device)
    columns, rows = shape[-1] // groups, scale.numel() // groups
    if not x.numel():
        return dx, dgate, torch.zeros(shape[-1] if to_weight else 0, dtype=weight.dtype, device=device)
    launch, size, programs = _backward_launch(
        device, (x.dtype, gate.dtype, weight.dtype, dy.dtype), columns, (x_rows, gate_rows, dy_rows),
        (form, groups), to_weight=to_weight, large=rows >= LARGE,
    )  # fmt: skip
    programs = min(programs, -(-rows // size))
    parts = torch.empty((programs, shape[-1]), dtype=torch.float32, device=device) if to_weight else scale
    launch(
        (programs, groups, 1), x, gate, weight, scale, dy, dx, dgate if gated else dx, parts,
        rows, *x_rows, *gate_rows, *dy_rows,
    )  # fmt: skip
    if to_weight:
        return dx, dgate, summed(parts, weight.dtype)
    return dx, dgate, torch.empty(0, dtype=weight.dtype, device=device)


def _out(form: str, x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if _FORMS[form].promotes else x.dtype


def _formula(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    form: str,
    groups: int,
) -> torch.Tensor:
    factor, place, silu, rounds, *_ = _FORMS[form]
    x32 = x.float()
    if place == _WEIGHT_BEFORE:
        x32 = (x32 * (1.0 + weight).float()).to(x.dtype).float()
    if place == _GATE_BEFORE and gate is not None:
        x32 = x32 * functional.silu(gate.float())
    apart = x32.reshape(*x32.shape[:-1], groups, x32.shape[-1] // groups)
    y = reference.unweighted(apart, eps).flatten(-2).to(x.dtype if rounds else torch.float32)
    if place != _WEIGHT_BEFORE:
        y = (1 + weight.float() if factor == ONE_PLUS else weight) * y
    if place == _GATE_AFTER and gate is not None:
        y = y * (functional.silu if silu else torch.sigmoid)(gate.float())
    return y.to(_out(form, x, weight))


#: Takes x, gate, weight, eps, a form and the number of groups.
_norm: Callable[..., torch.Tensor] = differentiable(
    _rms_norm_gated,
    lambda saved, rest, wanted, dy: _rms_norm_gated_backward(*saved, dy, rest[1], wanted[2]),
    _formula,
    tensors=3,
)


def one_plus_weight_before_norm(
    hidden_states: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the normalised ``(1 + weight) * x`` in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, None, weight, eps, "weight before", 1)


def one_plus_weight_grouped(
    hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int
) -> torch.Tensor:
    """Return ``(1 + weight) * xhat``; each ``group_size`` neighbours of ``[..., hidden]`` share a scale."""
    return _norm(hidden_states, None, weight, eps, "grouped", _groups(hidden_states, group_size))


def _gate_after(
    form: str,
    hidden_states: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    return _norm(hidden_states, gate, weight, eps, f"{form}{name_of(activation)}", 1)


#: Return ``weight * xhat * activation(gate)``, all ``[..., hidden]``: with ``xhat`` rounded first, or in
#: float32 until the end.
cast_before_weight_gated = partial(_gate_after, "rounded, ")
weight_before_cast_gated = partial(_gate_after, "")


def gate_before_norm(
    hidden_states: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return ``weight * xhat`` of ``x * silu(gate)``, both ``[..., hidden]``; without a gate, of ``x``."""
    return gate_before_norm_grouped(hidden_states, gate, weight, eps, hidden_states.shape[-1])


def gate_before_norm_grouped(
    hidden_states: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float, group_size: int
) -> torch.Tensor:
    """`gate_before_norm`; each ``group_size`` neighbours of ``[..., hidden]`` share a scale."""
    form = "no gate before" if gate is None else "gate before"
    return _norm(hidden_states, gate, weight, eps, form, _groups(hidden_states, group_size))


def _groups(hidden_states: torch.Tensor, group_size: int) -> int:
    return hidden_states.shape[-1] // group_size if hidden_states.shape[-1] else 1


def refuses_gate_after(
    owner: object,
    hidden_states: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: object,
) -> str | None:
    """Return why this call must run the upstream code, or None."""
    if name_of(activation) not in _ACTIVATIONS:
        return unknown(activation, "SiLU and sigmoid")
    return refuses_gate_before(owner, hidden_states, gate, weight, eps)


def refuses_gate_before(
    owner: object, hidden_states: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = plain.refuses(owner, hidden_states, weight, eps)
    if reason is not None or gate is None:
        return reason
    if (reason := not_plain(gate)) is not None:
        return reason
    if gate.dtype not in DTYPES or gate.layout is not torch.strided:
        return f"the gate has dtype {gate.dtype} and layout {gate.layout}"
    if gate.device != hidden_states.device:
        return f"the gate is on {gate.device}, the input on {hidden_states.device}"
    if gate.shape != hidden_states.shape:
        return "the gate and the input have different shapes"
    return None


def refuses_grouped(owner: object, hidden_states: torch.Tensor, *operands: Any) -> str | None:
    """Return why this call must run the upstream code, or None; the last operand is the group size."""
    *others, group_size = operands
    gate, weight, eps = others if len(others) == 3 else (None, *others)
    reason = refuses_gate_before(owner, hidden_states, gate, weight, eps)
    if reason is not None:
        return reason
    if not isinstance(group_size, int) or group_size < 1 or hidden_states.shape[-1] % group_size:
        return f"rows of {hidden_states.shape[-1]} values do not divide into groups of {group_size}"
    return None

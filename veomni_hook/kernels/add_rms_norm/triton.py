"""A residual addition and RMSNorm in Triton: two reads and two writes forward, three and one backward.

`veomni_hook.kernels.add_rms_norm.device` has the formulas. The backward is RMSNorm's operator
(`veomni_hook.kernels.rms_norm.triton`), which adds the gradient of the sum in float32, so that dx is rounded
once; this one tensor is the gradient of both addends.

Shapes: residual, hidden_states, sum [..., hidden], one dtype; weight [hidden].
Saved: the sum, weight, the scale of each row in float32. Mutates: nothing.
Deterministic and batch-invariant, bit for bit.

Measured on one H200, share of a copy's bandwidth, bfloat16: 96 to 98 % forward; backward 93 to 99 % up to
12288 columns (`tiles.split`: in one block 12288 reached 59 %), 56 % at 16384.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial

import torch
from torch import nn

from veomni_hook.kernels.add_rms_norm import device as kernels
from veomni_hook.kernels.add_rms_norm import reference
from veomni_hook.kernels.add_rms_norm.variants import OP
from veomni_hook.kernels.rms_norm import reference as formulas
from veomni_hook.kernels.rms_norm import triton as norms
from veomni_hook.kernels.rms_norm.tiles import ONE_PLUS, ONE_PLUS_ROUNDED, WEIGHT, Plan, plan_of_rows
from veomni_hook.kernels.rms_norm.variants import Norm
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, TL
from veomni_hook.kernels.shared.operand_checks import not_plain, unfit_addends, untraceable
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import readable

__all__ = ["kernel", "refuses", "unfit"]

_Pair = tuple[torch.Tensor, torch.Tensor]

_NORMS: dict[str, Norm] = {name: variant.form for name, variant in OP.variants.items()}
_NUMBERS = {"weight": WEIGHT, "one_plus": ONE_PLUS, "one_plus_rounded": ONE_PLUS_ROUNDED}
_FACTORS = {name: _NUMBERS[norm.factor] for name, norm in _NORMS.items()}


def _rounded(variant: str, x: torch.dtype, weight: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes to which the normalised values are rounded before the product, and that of the result."""
    rounded_to = _NORMS[variant].rounded_to
    if rounded_to == "x":
        return x, torch.promote_types(x, weight)
    return (weight, weight) if rounded_to == "weight" else (torch.float32, x)


@lru_cache(maxsize=LAUNCHES)
def _forward_plan(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: torch.Size,
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    variant: str,
    keep: bool,
) -> tuple[Plan, torch.dtype] | None:
    """Return the plan for addends of these strides, and the dtype of the norm; None: copy one first."""
    middle, out = _rounded(variant, *dtypes)
    steps = _FACTORS[variant], TL[middle], keep
    kind, kept = (device, (*dtypes, out)), tuple(shape[:-1])
    plan = plan_of_rows(kernels.forward, kind, shape, strides, kept, 6, *steps)
    return None if plan is None else (plan, out)


@operator(
    lambda residual, hidden_states, weight, eps, variant: (
        residual.new_empty(residual.shape),
        residual.new_empty(residual.shape, dtype=_rounded(variant, residual.dtype, weight.dtype)[1]),
        residual.new_empty(residual.shape[:-1], dtype=torch.float32),
    )
)
def _add_rms_norm(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    variant: str,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device, shape, dtype = residual.device, residual.shape, residual.dtype
    kind = device, (dtype, weight.dtype), shape
    planned = _forward_plan(*kind, (residual.stride(), hidden_states.stride()), variant, keep)
    if planned is None:
        residual, hidden_states = readable(residual)[0], readable(hidden_states)[0]
        planned = _forward_plan(*kind, (residual.stride(), hidden_states.stride()), variant, keep)
        assert planned is not None  # noqa: S101
    (launch, grid, numbers, scales, like), out = planned
    total = torch.empty_like(residual) if like else torch.empty(shape, dtype=dtype, device=device)
    y = torch.empty_like(residual) if like and out is dtype else torch.empty(shape, dtype=out, device=device)
    scale = torch.empty_strided(*scales, dtype=torch.float32, device=device) if keep else y
    if launch is not None:
        launch(grid, residual, hidden_states, weight, total, y, scale, *numbers, float(eps))
    return total, y, scale


def _gradients(
    saved: Sequence[torch.Tensor],
    rest: tuple[float, str],
    wanted: Sequence[bool],
    dtotal: torch.Tensor | None,
    dy: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return dtotal, None
    (total, weight, scale), (_, variant) = saved, rest
    form = _FACTORS[variant], _rounded(variant, total.dtype, weight.dtype)[0]
    return norms.rms_norm_backward(total, weight, scale, dy, dtotal, *form, wanted[1])


#: Takes the addends, the weight, eps and the variant.
_apply: Callable[..., _Pair] = differentiable(
    _add_rms_norm,
    _gradients,
    lambda total, weight, eps, variant: (total, getattr(formulas, variant)(total, weight, eps)),
    tensors=3,
    results=2,
    addends=2,
    # The last layer's sum, or an unused norm, has no gradient: do not allocate zeros for it.
    sparse=True,
    direct={"keep": False},
)


def _added(
    formula: Callable[..., _Pair],
    variant: str,
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> _Pair:
    """Return the sum and its ``variant``; ``formula`` computes unsupported operands."""
    # The addends may be computed only after the kernel was selected.
    if unfit(residual, hidden_states, weight, eps) is not None:
        return formula(residual, hidden_states, weight, eps)
    return _apply(residual, hidden_states, weight, eps, variant)


@cache
def kernel(variant: str) -> Callable[..., _Pair]:
    """Return the function that adds and normalises as ``variant``."""
    return partial(_added, reference.of(variant), variant)


def unfit(
    residual: torch.Tensor, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float
) -> str | None:
    """Return why the kernels cannot take these operands, or None."""
    reason = (
        not_plain(residual, hidden_states, weight) or untraceable() or unfit_addends(residual, hidden_states)
    )
    return reason if reason is not None else norms.unfit(residual, weight, eps)


def refuses(
    owner: object,
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    norm: nn.Module,
    norm_class: type[nn.Module],
) -> str | None:
    """Return what the kernel refuses, beside `skipped_calls`, or None."""
    if (reason := unfit_addends(residual, hidden_states)) is not None:
        return reason
    parameters = norm._parameters
    weight = parameters.get("weight")
    if weight is None or len(parameters) != 1:
        named = [parameter for parameter in parameters.values() if parameter is not None]
        if len(named) != 1:
            return f"the norm has {len(named)} parameters instead of only a weight"
        weight = named[0]
    # eps is checked in the call, and the addends were above.
    reason = not_plain(weight)
    return reason if reason is not None else norms.unfit(residual, weight, 0.0)

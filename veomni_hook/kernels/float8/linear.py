"""A linear layer with float8 products: `Float8Linear`, or in MX `MXLinear`, in place of ``nn.Linear``.

Forward:  y = x W^T + bias, in float8
Backward: dx = dy W and dW = dy^T x in float8;  dbias = the sum of dy, in its dtype
Shapes: x ``[..., in]``, W ``[out, in]``, y ``[..., out]`` in the dtype that the plain layer's result has.
Saved: x if W needs a gradient, W by reference; for a gated product, what it is made of
(`gated_mlp.recomputed`). Mutates: nothing. A recorded backward differentiates the plain layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from veomni_hook.kernels.float8.products import check_device, gradients, linear, widths_refused
from veomni_hook.kernels.gated_mlp.recomputed import Products, projection
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared.autograd import applied, is_recorded
from veomni_hook.kernels.shared.autograd import gradients as gradients_of
from veomni_hook.kernels.shared.function_modes import active, intercepting
from veomni_hook.kernels.shared.held import hold_in_checkpoint, saved_by
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.settings import FLOAT8, MXFP8

__all__ = ["CLASSES", "Float8Linear", "MXLinear", "float8_linear"]

Tensor = torch.Tensor

_PRODUCTS = {mx: Products(partial(linear, mx=mx), partial(gradients, mx=mx)) for mx in (False, True)}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TORCH_LINEAR = functional.linear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor | None, mx: bool
    ) -> Tensor:
        if handle is None:
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, bias)
        ctx.node, ctx.mx = None if handle is None else handle.grad_fn, mx
        return linear(x, weight, bias, mx=mx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors if ctx.node is None else saved_by(ctx.node)
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        if is_recorded():
            if x is None and to_x:  # the gradient of x does not depend on it
                x = dy.new_zeros(*dy.shape[:-1], weight.shape[1]).requires_grad_()
            return *gradients_of(_plain, (x, weight, bias), (to_x, to_weight, to_bias), (dy,)), None, None
        products = gradients(dy, mx=ctx.mx)
        dx = products.of_input(weight) if to_x else None
        dweight = products.of_weight(x).to(weight.dtype) if to_weight else None
        return dx, dweight, dy.flatten(0, -2).sum(0).to(bias.dtype) if to_bias else None, None, None


_linear = applied(_Linear)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, mx: bool = False) -> Tensor:
    """Return ``x W^T + bias`` in float8, ``x [..., in]``, with gradients; `refuses` has accepted these."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    elif (y := projection(x, weight, bias, _PRODUCTS[mx])) is not None:
        return y
    if not torch.compiler.is_compiling():
        x = x.as_subclass(Tensor)  # what a gated kernel returns
    if not torch.is_grad_enabled() or not any(
        operand is not None and operand.requires_grad for operand in (x, weight, bias)
    ):
        return linear(x, weight, bias, mx=mx)
    handle = hold_in_checkpoint(x, weight, bias) if weight.requires_grad else None
    return _linear(x, weight, bias, handle, mx)  # type: ignore[no-any-return]


class Float8Linear(nn.Linear):
    """An ``nn.Linear`` whose products are computed in float8 while the hook is active.

    Attributes:
        mx: scales are those of MX.
        plain_because: why the plain product ran in the last call; empty: it did not.
    """

    mx = False
    plain_because = ""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input W^T + bias``."""
        weight, bias = self.weight, self.bias
        reason = refuses(input, weight, bias, mx=self.mx) if STATE.active else "the hook is not active"
        if not torch.compiler.is_compiling() and (reason or "") != self.plain_because:
            self.plain_because = reason or ""
        if reason is None:
            return float8_linear(input, weight, bias, mx=self.mx)
        return functional.linear(input, weight, bias)


class MXLinear(Float8Linear):
    """A `Float8Linear` in MX: 32 neighbours share a scale."""

    mx = True


#: What takes the place of ``nn.Linear``, by the value of the setting.
CLASSES: dict[str, type[Float8Linear]] = {FLOAT8: Float8Linear, MXFP8: MXLinear}


def refuses(x: Tensor, weight: Tensor, bias: Tensor | None, *, mx: bool = False) -> str | None:
    """Return why these operands are multiplied as upstream does, or None.

    Raises:
        KernelError: their device has no float8.
    """
    reason = not_plain(x, weight) or (None if bias is None else not_plain(bias)) or untraceable()
    if reason is None and active():
        reason = intercepting()
    if reason is None and functional.linear is not _TORCH_LINEAR:
        reason = "torch.nn.functional.linear has been replaced"
    if reason is None and x.is_meta:
        reason = "the tensors have no numbers (meta)"
    if reason is not None:
        return reason
    kind = x.device.type
    converted = torch.is_autocast_enabled(kind)
    if x.dtype not in _DTYPES or weight.dtype not in _DTYPES or not (converted or x.dtype is weight.dtype):
        return f"the input is {x.dtype}, the weight {weight.dtype}"
    if x.device != weight.device or x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        return "the input is no rows for this weight"  # or torch says what is wrong
    if (reason := widths_refused(weight, mx=mx)) is not None:
        return reason
    check_device(x, mx=mx)
    return None

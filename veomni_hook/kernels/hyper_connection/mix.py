"""Mixed streams in Triton: one launch in each direction; `mix_device` has the formulas.

Shapes: post [B, S, N], comb [B, S, N, N], output [B, S, D], hidden_streams [B, S, N, D], the last two in one
dtype of float32, bfloat16 and float16. Saved: the operands. Mutates: nothing. Deterministic. The gradients of
the weights are sums in float32; upstream's are rounded to the streams' dtype on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from veomni_hook.kernels.hyper_connection import mix_device as kernels
from veomni_hook.kernels.hyper_connection import reference
from veomni_hook.kernels.hyper_connection.rules import unsupported
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, STEPS, Launch, cdiv, power
from veomni_hook.kernels.shared.operators import operator

__all__ = ["mix", "refuses"]

Tensor = torch.Tensor
# Columns per program, of all streams.
_FORWARD, _BACKWARD = 1024, 512
_Kind = tuple[torch.dtype, ...]


# Cached by all Triton specialisations.
@lru_cache(maxsize=LAUNCHES)
def _launch(device: torch.device, kind: _Kind, n: int, columns: int, *, back: bool) -> Launch:
    function, tensors, most = (kernels.backward, 9, _BACKWARD) if back else (kernels.forward, 5, _FORWARD)
    return Launch(function, tensors, columns, n, min(power(columns), most), num_warps=4, **STEPS)


@operator(lambda x, post, comb, output: x.new_empty(x.shape))
def _hyper_connection_mix(x: Tensor, post: Tensor, comb: Tensor, output: Tensor) -> Tensor:
    x, post, comb, output = (tensor.contiguous() for tensor in (x, post, comb, output))
    batch, length, n, columns = x.shape
    y = torch.empty_like(x)
    launch = _launch(x.device, (x.dtype, post.dtype, comb.dtype), n, columns, back=False)
    grid = batch * length, cdiv(columns, min(power(columns), _FORWARD)), 1
    launch(grid, post, comb, output, x, y)
    return y


@operator(lambda dy, *operands: tuple(x.new_empty(x.shape) for x in operands))
def _hyper_connection_mix_backward(
    dy: Tensor, post: Tensor, comb: Tensor, output: Tensor, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy, *operands = (tensor.contiguous() for tensor in (dy, post, comb, output, x))
    batch, length, n, columns = x.shape
    results = [torch.empty_like(operand) for operand in operands]
    launch = _launch(x.device, (x.dtype, post.dtype, comb.dtype), n, columns, back=True)
    launch((batch * length, 1, 1), dy, *operands, *results)
    dpost, dcomb, doutput, dx = results
    return dpost, dcomb, doutput, dx


def _gradients(saved: Sequence[Tensor], _: object, __: object, dy: Tensor) -> tuple[Tensor, ...]:
    x, *weights = saved
    dpost, dcomb, doutput, dx = _hyper_connection_mix_backward(dy, *weights, x)
    return dx, dpost, dcomb, doutput


_apply: Callable[..., Tensor] = differentiable(
    _hyper_connection_mix,
    _gradients,
    lambda x, post, comb, output: reference.mix(post, comb, output, x, x.dtype),
    tensors=4,
)


def mix(post: Tensor, comb: Tensor, output: Tensor, hidden_streams: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``post * output + comb^T @ hidden_streams``; operands are those of `rules.refuses_mix`."""
    return _apply(hidden_streams, post, comb, output)


def refuses(
    owner: object, post: Tensor, comb: Tensor, output: Tensor, hidden_streams: Tensor, dtype: object
) -> str | None:
    """Return what the kernels refuse, beside `rules.refuses_mix`, or None."""
    return unsupported(hidden_streams, post, comb)

"""Causal convolutions of one channel at a time in Triton: one pass over memory in each direction.

Shapes: hidden states ``[rows, channels, positions]`` in float32, bfloat16 or float16, weight ``[channels, 1
to 4 taps]`` and bias of one dtype. What is next to each other in memory should be channels, as in a
transposed ``[rows, positions, channels]``; another layout is copied first. The result is laid out so. Saved:
the operands. Mutates: nothing. Deterministic: the weight's gradient is summed in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from veomni_hook.kernels.causal_conv import device as kernels
from veomni_hook.kernels.causal_conv.torch import depthwise as in_torch
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.host_values import derived
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power, room
from veomni_hook.kernels.shared.operand_checks import DTYPES
from veomni_hook.kernels.shared.operators import operator

__all__ = ["depthwise", "refuses"]

Tensor = torch.Tensor
_MOST_TAPS = 4
#: In each direction: channels of a program, those of a thread, and how many programs the registers of a
#: multiprocessor of Hopper hold.
_CHANNELS, _OF_A_THREAD, _RESIDENT = (512, 128), (4, 2), (8, 14)
#: Positions of a program, and how many it takes the time of beside them: those around the run, and its sums.
#: All programs at once take turns on the multiprocessors, and a last turn of a few costs as much as a whole
#: one. On an H100, 16,384 x 8,192 in bfloat16, backward, share of a copy's bandwidth: runs of 64 73 %, of 128
#: 78 %, of 192 (three turns) 82 %, of 256 (two turns and a fifth) 76 %. Forward 64 gave 89 %, and 32 and 128
#: 1 to 2 % less.
_RUNS, _AROUND = ((32, 64), (32, 64, 128, 192, 256)), 16


@lru_cache(maxsize=LAUNCHES)
def _launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    backward: bool,
    block: int,
    *constants: object,
) -> Launch:
    function, tensors = (kernels.backward, 7) if backward else (kernels.forward, 5)
    return Launch(
        function, tensors, *constants, block, num_warps=max(1, block // 32 // _OF_A_THREAD[backward])
    )


def _sizes(x: Tensor, backward: bool) -> tuple[int, int, tuple[int, int, int]]:
    """Positions and channels of a program, and the grid."""
    rows, positions, channels = x.shape
    block = min(_CHANNELS[backward], power(channels))
    blocks = cdiv(channels, block)
    at_once = room(x.device)[0] * _RESIDENT[backward]
    # The time of a run: how many turns, and how long one is.
    run = min(
        _RUNS[backward],
        key=lambda run: cdiv(rows * blocks * cdiv(positions, run), at_once) * (run + _AROUND),
    )
    return run, block, (blocks, cdiv(positions, run), rows)


def _by_position(x: Tensor) -> Tensor:
    """``[rows, channels, positions]`` as ``[rows, positions, channels]`` with channels next to each other."""
    x = x.transpose(1, 2)
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


@operator(
    lambda x, weight, bias, cu_seqlens, silu: x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)
)
def _causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> Tensor:
    x, weight = _by_position(x), weight.contiguous()
    rows, positions, channels = x.shape
    y = x.new_empty(rows, positions, channels)
    begins = y if cu_seqlens is None else derived(cu_seqlens, _begins, positions, x.device)
    run, block, grid = _sizes(x, False)
    flags = (weight.shape[1], bias is not None, silu, cu_seqlens is not None)
    launch = _launch(
        x.device, (x.dtype, weight.dtype), False, block, channels, x.stride(0), x.stride(1), *flags, run
    )
    if y.numel():
        launch(grid, x, weight, weight if bias is None else bias, begins, y, positions)
    return y.transpose(1, 2)


@operator(
    lambda dy, x, weight, *others: (
        x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[0]),
    )
)
def _causal_conv_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, x, weight = _by_position(dy), _by_position(x), weight.contiguous()
    rows, positions, channels = x.shape
    dx = x.new_empty(rows, positions, channels)
    begins = dx if cu_seqlens is None else derived(cu_seqlens, _begins, positions, x.device)
    run, block, grid = _sizes(x, True)
    taps = weight.shape[1]
    flags = (taps, bias is not None, silu, cu_seqlens is not None)
    sums = x.new_zeros(max(1, rows * grid[1]), 5, channels, dtype=torch.float32)
    strides = (x.stride(0), x.stride(1), dy.stride(0), dy.stride(1))
    launch = _launch(
        x.device, (x.dtype, weight.dtype, dy.dtype), True, block, channels, *strides, *flags, run
    )
    if dx.numel():
        launch(grid, x, weight, weight if bias is None else bias, begins, dy, dx, sums, positions)
    total = sums.sum(0).to(weight.dtype)
    return dx.transpose(1, 2), total[4 - taps : 4].t().contiguous(), total[4].clone()


def _begins(cu_seqlens: Tensor, positions: int, device: torch.device) -> Tensor:
    """Of each position, where in its row its sample begins."""
    starts = cu_seqlens[:-1].long() % max(positions, 1)
    return starts.repeat_interleave(cu_seqlens.diff().long()).to(torch.int32).to(device, non_blocking=True)


#: Not saved as a tensor: ``cu_seqlens``. What the host knows of it belongs to this object.
_convolution: Callable[..., Tensor] = differentiable(
    _causal_conv,
    lambda saved, rest, wanted, dy: _causal_conv_backward(dy, *saved, *rest),
    lambda x, weight, bias, cu_seqlens, silu: in_torch(x, weight, bias, "silu" if silu else None, cu_seqlens),
    tensors=3,
)


def depthwise(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return what `reference.depthwise` says."""
    return _convolution(hidden_states, weight, bias, cu_seqlens, activation is not None)


def refuses(
    owner: object, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, *others: object
) -> str | None:
    """Return what the kernel refuses, beside `operand_checks`, or None."""
    if weight.shape[1] > _MOST_TAPS:
        return f"the kernel has {weight.shape[1]} taps, more than {_MOST_TAPS}"
    dtypes = {tensor.dtype for tensor in (weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not dtypes | {hidden_states.dtype} <= DTYPES:
        return f"the input is {hidden_states.dtype}, the weight {weight.dtype}"
    return None

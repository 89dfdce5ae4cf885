"""Plans of norm and rotation: how a call of given shapes and strides is launched.

A plan is made once for everything that Triton specialises on, and for the sizes and strides of a call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from veomni_hook.kernels.qk_norm_rotary import device
from veomni_hook.kernels.shared.launch import LAUNCHES, STEPS, TL, Launch, cdiv, power, room

__all__ = [
    "MOST_NUMBERS",
    "Dtypes",
    "Form",
    "Launched",
    "Shapes",
    "Strides",
    "backward_plan",
    "forward_plan",
    "positions_first",
    "readable",
    "result",
    "stand_in",
]

Tensor = torch.Tensor
#: Tiles over all heads of a position are unrolled; more numbers would need too many tiles.
MOST_NUMBERS = 1 << 17
#: A program takes several positions until it has this many numbers.
_FEW_NUMBERS, _MOST_POSITIONS = 1024, 4


# Numbers per tile and warp. On an H200, share of a copy's bandwidth at 32/8 heads of 128: forward 95 % (88 %
# with 512 per warp), backward 96 %.
_FORWARD, _BACKWARD = (4096, 1024), (2048, 512)
#: Loads in flight of the backward, and its programs per multiprocessor. There, it reaches 92 % with three
#: loads, and 76 % with one. Fewer heads need more programs: 75 % with four and 41 % with one at 16/8 heads of
#: 64.
_STAGES, _PROGRAMS = 4, 4
#: How many numbers of positions the programs of a multiprocessor work on together.
_NUMBERS_A_PROCESSOR = 6144


def _sizes(
    tile: int, a_warps: int, q: Tensor, k: Tensor, cos: Tensor
) -> tuple[tuple[int, ...], int, int, int]:
    """Return the constants of a launch, positions and warps per program, and numbers per position.

    The constants are the heads of q and k, their blocks; of a head, half of the numbers that are rotated, and
    those that are not, and the blocks of both.
    """
    half = cos.shape[2] // 2
    rest = q.shape[3] - 2 * half
    half_block, rest_block = power(half), power(rest)
    row = power(2 * half_block + (rest_block if rest else 0))
    q_block, k_block = (min(power(x.shape[1]), max(1, tile // row)) for x in (q, k))
    numbers = max(q_block, k_block) * row
    sizes = q.shape[1], k.shape[1], q_block, k_block, half, rest, half_block, rest_block
    positions = max(1, min(_MOST_POSITIONS, _FEW_NUMBERS // numbers))
    heads = sum(cdiv(x.shape[1], block) * block for x, block in ((q, q_block), (k, k_block)))
    return sizes, positions, max(1, min(8, numbers // a_warps)), heads * row


def readable(x: Tensor) -> Tensor:
    """``x``, or a copy in the memory order ``[batch, length, heads, head_dim]`` if rows are scattered."""
    return x if x.stride(3) == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


def _table_strides(x: Tensor) -> tuple[int, int]:
    """The strides of batch and length in a table; a single batch is broadcast."""
    return (x.stride(0) if x.shape[0] > 1 else 0), x.stride(1)


def positions_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of the shape of ``x``, in the memory order of ``[batch, length, heads, head_dim]``."""
    b, h, s, d = x.shape
    return torch.empty_strided((b, h, s, d), (s * h * d, d, h * d, 1), dtype=dtype, device=x.device)


def result(x: Tensor, dtype: torch.dtype, *, joined: bool) -> Tensor:
    """An empty tensor with the strides of upstream's result: concatenated results are contiguous."""
    output = torch.empty_like(
        x, dtype=dtype, memory_format=torch.contiguous_format if joined else torch.preserve_format
    )
    # Upstream preserves non-contiguous columns; here rows are written contiguously.
    return output if output.stride(3) == 1 else positions_first(x, dtype)


class Launched(NamedTuple):
    """How a call is launched; ``results`` are the sizes and strides of both results.

    ``launch`` is None if there is nothing to compute. ``numbers`` are the arguments after the two eps.
    """

    launch: Launch | None
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    results: tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


Shapes = tuple[torch.Size, ...]
Strides = tuple[tuple[int, ...], ...]
Dtypes = tuple[torch.dtype, ...]
#: The factor; the dtypes of normalised values, norms, products and results; whether results are joined.
Form = tuple[int, torch.dtype, torch.dtype, torch.dtype, torch.dtype, bool]


def stand_in(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without data: plans depend on shapes and strides."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


# Plans depend on everything that Triton specialises on, and on the sizes and strides of a call.
@lru_cache(maxsize=LAUNCHES)
def forward_plan(
    on: torch.device,
    dtypes: Dtypes,
    shapes: Shapes,
    strides: Strides,
    form: tuple[int, torch.dtype, torch.dtype, torch.dtype],
    joined: bool,
) -> Launched:
    """Return the forward's plan.

    Args:
        on: where it runs.
        dtypes: of q, the weights, cos and the results.
        shapes: of q, k and cos.
        strides: of q, k, cos and sin.
        form: the factor, and the dtypes to which normalised values, norms and products are rounded.
        joined: whether upstream concatenates the results.
    """
    q, k = (stand_in(*layout, dtypes[0]) for layout in zip(shapes[:2], strides[:2], strict=True))
    cos, sin = (stand_in(shapes[2], stride, dtypes[2]) for stride in strides[2:])
    q_out, k_out = (result(x, dtypes[3], joined=joined) for x in (q, k))
    results = (tuple(q_out.shape), q_out.stride()), (tuple(k_out.shape), k_out.stride())
    positions, length = q.shape[0] * q.shape[2], q.shape[2]
    if not positions:
        return Launched(None, (0, 0, 0), (), results)
    sizes, at_once, warps, _ = _sizes(*_FORWARD, q, k, cos)
    factor, *rounded = form
    constants = *sizes, factor, *(TL[dtype] for dtype in rounded), at_once
    numbers = (
        positions, length, *q.stride()[:3], *k.stride()[:3], *_table_strides(cos), *_table_strides(sin),
        *q_out.stride()[:3], *k_out.stride()[:3],
    )  # fmt: skip
    launch = Launch(device.forward, 8, *constants, num_warps=warps, **STEPS)
    return Launched(launch, (cdiv(positions, at_once), 1, 1), numbers, results)


@lru_cache(maxsize=LAUNCHES)
def backward_plan(
    on: torch.device,
    dtypes: Dtypes,
    shapes: Shapes,
    strides: Strides,
    form: tuple[int, torch.dtype],
    to_weight: bool,
) -> Launched:
    """Return the backward's plan: as `forward_plan`, with the gradients' dtype and strides at the ends."""
    q, k = (stand_in(*each, dtypes[0]) for each in zip(shapes[:2], strides[:2], strict=True))
    cos, sin = (stand_in(shapes[2], stride, dtypes[2]) for stride in strides[2:4])
    dq, dk = (positions_first(x, x.dtype) for x in (q, k))
    results = (tuple(dq.shape), dq.stride()), (tuple(dk.shape), dk.stride())
    positions, length = q.shape[0] * q.shape[2], q.shape[2]
    sizes, at_once, warps, per_position = _sizes(*_BACKWARD, q, k, cos)
    together = max(1, _NUMBERS_A_PROCESSOR // (at_once * (q.shape[1] + k.shape[1]) * q.shape[3]))
    a_processor = min(_PROGRAMS, together)
    processors, memory = room(on)
    staged = a_processor * per_position * at_once * (dtypes[0].itemsize + dtypes[3].itemsize)
    stages = min(_STAGES, 1 + memory // max(staged, 1))
    programs = min(a_processor * processors, cdiv(positions, at_once))
    if not programs:
        return Launched(None, (0, 0, 0), (), results)
    factor, middle = form
    constants = *sizes, factor, TL[middle], to_weight, at_once, stages
    numbers = (
        positions, length, *q.stride()[:3], *k.stride()[:3], *_table_strides(cos), *_table_strides(sin),
        *strides[4][:3], *strides[5][:3],
    )  # fmt: skip
    launch = Launch(device.backward, 11, *constants, num_warps=warps)
    return Launched(launch, (programs, 1, 1), numbers, results)

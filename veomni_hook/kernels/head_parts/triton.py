"""Parts of heads in Triton: the join in one pass, forward, and backward as the gradient of the split.

Shapes: x ``[a, b, c, first]``, y ``[a, b, c, second]`` of any strides, also expanded; the result is
``[a, b, c, first + second]``. Its memory has the order of the first part's dimensions, and the gradient of a
split that of its operand: heads that a projection made side by side stay so, and neither attention nor the
projection's gradient has to copy them. `torch.cat` makes a contiguous result.
Saved: nothing. Mutates: nothing. Parts are views, as those of `torch.split`; the gradients of joined parts
are views of the incoming one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from veomni_hook.kernels.head_parts import device
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power
from veomni_hook.kernels.shared.operand_checks import wants_grad
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import dense_rows

__all__ = ["joined", "loses", "refuses", "split"]

Tensor = torch.Tensor

# Numbers of a program and of a warp; with a wider part, a program would run out of registers.
_TILE, _A_WARPS_NUMBERS, _WIDEST = 4096, 512, 1024
#: With fewer numbers, `torch.cat` takes some microseconds, by its rate at larger sizes: no more than the host
#: needs to launch this.
_FEWEST = 1 << 20


def _order(x: Tensor) -> list[int]:
    """Return the first three dimensions as they follow each other in memory; expanded ones come last."""
    strides, order = x.stride(), [0, 1, 2]
    # By exchanges, because dynamo does not sort by strides that vary.
    for place in (0, 1, 0):
        if strides[order[place]] < strides[order[place + 1]]:
            order[place], order[place + 1] = order[place + 1], order[place]
    return order


def _empty(x: Tensor, y: Tensor, order: Sequence[int]) -> Tensor:
    """Allocate the result."""
    z = x.new_empty(*(x.shape[dim] for dim in order), x.shape[-1] + y.shape[-1])
    return z.permute(*(order.index(dim) for dim in range(3)), 3)


@lru_cache(maxsize=LAUNCHES)
def _launch(
    on: torch.device, dtype: torch.dtype, first: int, second: int, kinds: tuple[tuple[bool, ...], ...]
) -> tuple[Launch, int]:
    """Return how to launch the join, and the rows of a program."""
    blocks = power(first), power(second)
    rows = max(1, _TILE // power(sum(blocks)))
    warps = max(1, rows * power(sum(blocks)) // _A_WARPS_NUMBERS)
    return Launch(device.join, 3, first, second, *blocks, rows, num_warps=warps), rows


@operator(_empty)
def _head_parts_joined(x: Tensor, y: Tensor, order: Sequence[int]) -> Tensor:
    x, y = dense_rows(x), dense_rows(y)
    z = _empty(x, y, order)
    if z.numel():
        strides = [part.stride(dim) for part in (x, y) for dim in order]
        # What Triton specialises on; the sizes vary with the tokens and are told apart by nothing.
        kinds = tuple((stride == 1, stride % 16 == 0, stride >> 31 > 0) for stride in strides)
        launch, block = _launch(x.device, x.dtype, x.shape[-1], y.shape[-1], kinds)
        outer, middle, inner = (z.shape[dim] for dim in order)
        rows = outer * middle * inner
        launch((cdiv(rows, block), 1, 1), x, y, z, rows, middle, inner, *strides)
    return z


def _side_by_side(x: Tensor, y: Tensor, order: list[int], first: int) -> Tensor:
    return _head_parts_joined(x, y, order)


#: Takes both parts, the order of the result's dimensions in memory, and the width of the first part.
_joined: Callable[..., Tensor] = differentiable(
    _side_by_side,
    lambda saved, rest, wanted, dz: (dz[..., : rest[1]], dz[..., rest[1] :]),
    None,
    tensors=2,
    unread=2,
)


def _apart(x: Tensor, order: list[int], first: int) -> tuple[Tensor, Tensor]:
    return x[..., :first], x[..., first:]


#: Takes what is split, the order of its dimensions in memory, and the width of the first part.
_parts: Callable[..., tuple[Tensor, Tensor]] = differentiable(
    _apart,
    lambda saved, rest, wanted, dx, dy: (_joined(dx, dy, *rest),),
    None,
    tensors=1,
    results=2,
    unread=1,
)


def joined(parts: Sequence[Tensor], dim: int, function: object) -> Tensor:
    """Return two parts side by side along the last dimension."""
    x, y = parts
    return _joined(x, y, _order(x), x.shape[-1])


def split(x: Tensor, sizes: Sequence[int], dim: int, function: object) -> tuple[Tensor, Tensor]:
    """Return views of both parts along the last dimension; their gradients are joined in one pass."""
    return _parts(x, _order(x), sizes[0])


def refuses(owner: object, x: Tensor | Sequence[Tensor], *others: object) -> str | None:
    """Return what the kernel refuses, beside `rules`, or None; ``x`` is what is split, or both parts."""
    parts = (x,) if isinstance(x, Tensor) else x
    if any(part.shape[-1] > _WIDEST for part in parts):
        return f"heads are wider than {_WIDEST}"
    return None if parts[0].shape[:-1].numel() < 1 << 31 else "there are too many heads at all positions"


def loses(owner: object, x: Tensor | Sequence[Tensor], *others: object) -> str | None:
    """Return why torch's call is as fast, or None; ``x`` as in `refuses`."""
    if isinstance(x, Tensor) and not wants_grad(x):
        return "no gradient is needed: torch.split returns views as well"
    numbers = sum(part.numel() for part in ((x,) if isinstance(x, Tensor) else x))
    return f"there are fewer than {_FEWEST:,} numbers" if numbers < _FEWEST else None

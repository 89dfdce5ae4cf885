"""What launches of LayerNorm need to know of the shapes and strides of a call, computed once for each."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from veomni_hook.kernels.layer_norm import device as kernels
from veomni_hook.kernels.rms_norm.tiles import (
    LARGE,
    Plan,
    backward_tile,
    forward_tile,
    plan_of_rows,
    stages_of,
    warps_of,
)
from veomni_hook.kernels.shared.launch import LAUNCHES, TL, cdiv, launch_of, power, room
from veomni_hook.kernels.shared.rows import Rows, contiguous_strides, rows_at

__all__ = ["backward_plan", "forward_plan", "sum_plan"]

_Strides = tuple[int, ...]

#: Wider weights do not stay in registers. Of RMSNorm's backward at 16,384 columns in bfloat16, one H200
#: reached 58 % of a copy's bandwidth with a weight that stays, 86 % with one that is read for every row.
#: And the most rows in flight then.
_MOST_HELD, _FEWEST_TILES = 8192, 3


@lru_cache(maxsize=LAUNCHES)
def forward_plan(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    shape: torch.Size,
    strides: _Strides,
    groups: int,
    rounded: tuple[torch.dtype, torch.dtype],
    keep: bool,
) -> Plan | None:
    """Return the plan for x of these strides, or None if it must be copied first.

    Args:
        device: where it runs.
        dtypes: those of x, the weight, the bias (None if there is none) and the result.
        shape: of x, with the groups as the last dimension but one if there are several.
        strides: of x.
        groups: how many parts of a row are normalised, each by itself.
        rounded: the dtypes to which ``xhat`` and its product with the weight are rounded.
        keep: whether a backward needs the moments.
    """
    x_rows = _rows_of_groups(shape, strides, groups)
    if x_rows is None:
        return None
    columns, count = shape[-1], prod(shape)
    sizes = (2, *shape[:-1])
    kept = sizes, contiguous_strides(sizes)
    like = strides == contiguous_strides(shape)
    if not count:
        return Plan(None, (0, 0, 0), (), kept, like)
    rows = count // (columns * groups)
    block, tile = power(columns), forward_tile(columns)
    size = tile // block
    _, weight, bias, _ = dtypes
    steps = int(weight is not None), int(bias is not None), TL[rounded[0]], TL[rounded[1]], keep
    # A product and the sum after it may become one operation, which rounds once, where both are in 16 bits.
    fused = bias is None or rounded[1] is torch.float32
    launch = launch_of(
        (device, dtypes, x_rows, rows >= LARGE), kernels.forward, 5, columns, groups, block, size, *steps,
        num_warps=warps_of(tile), enable_fp_fusion=fused,
    )  # fmt: skip
    return Plan(launch, (cdiv(rows, size), groups, 1), (rows, *x_rows), kept, like)


@lru_cache(maxsize=LAUNCHES)
def sum_plan(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    shape: torch.Size,
    strides: tuple[_Strides, _Strides],
    keep: bool,
) -> Plan | None:
    """Return the plan of a sum and its norm, or None if an addend must be copied first; as `forward_plan`."""
    steps = int(dtypes[1] is not None), int(dtypes[2] is not None), keep
    kept = (2, *shape[:-1])
    return plan_of_rows(kernels.forward_of_sum, (device, dtypes), shape, strides, kept, 7, *steps)


@lru_cache(maxsize=LAUNCHES)
def backward_plan(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    shape: torch.Size,
    strides: tuple[_Strides, ...],
    groups: int,
    middle: torch.dtype,
    wanted: tuple[bool, bool, bool],
) -> Plan | None:
    """Return the backward's plan, or None if x, dy or the gradient that is added must be copied first.

    Args:
        device: where it runs.
        dtypes: those of x, dy and the weight (None if there is none).
        shape: as in `forward_plan`.
        strides: those of x, dy and the gradient that is added; one of the others' if there is none.
        groups: as in `forward_plan`.
        middle: the dtype to which ``xhat`` is rounded.
        wanted: whether a gradient of the dtype of x is added to dx, and whether the gradients of the weight
            and of the bias are wanted.
    """
    added, *needed = wanted
    places = [_rows_of_groups(shape, stride, groups) for stride in strides]
    where = tuple(place for place in places if place is not None)
    if len(where) < len(places):
        return None
    columns, count = shape[-1], prod(shape)
    width = columns * groups
    total = width * sum(needed)
    like = strides[0] == contiguous_strides(shape)
    if not count:
        return Plan(None, (0, 0, 0), (), ((0, total), (1, 1)), like)
    rows = count // width
    block, tile = power(columns), backward_tile(columns)
    size = tile // block
    processors, memory = room(device)
    x, dy, weight = dtypes
    assert x is not None and dy is not None  # noqa: S101
    loaded = x.itemsize + dy.itemsize + (x.itemsize if added else 0)
    again = block > _MOST_HELD
    if again:
        # Triton stages one tile less than there are stages.
        stages = min(_FEWEST_TILES, memory // (tile * (loaded + (weight or x).itemsize)) + 1)
    else:
        stages = stages_of(tile, size * columns, loaded, memory)
    kind = device, dtypes, *(where if added else where[:2]), rows >= LARGE
    steps = int(weight is not None), TL[middle], added, *map(int, needed), again, stages
    constants = columns, groups, block, size, *steps
    launch = launch_of(kind, kernels.backward, 7, *constants, num_warps=warps_of(tile))
    programs = min(cdiv(processors, groups), cdiv(rows, size))
    numbers = rows, *(number for one in where for number in one)
    return Plan(launch, (programs, groups, 1), numbers, ((programs, total), (total, 1)), like)


def _rows_of_groups(shape: torch.Size, strides: _Strides, groups: int) -> Rows | None:
    """Return where the rows of all groups begin, or None if this takes more than three strides."""
    if groups == 1:
        return rows_at(shape, strides)
    columns = shape[-1]
    if strides[-2] != columns or (strides[-1] != 1 and columns > 1):
        return None  # groups that are no neighbours
    return rows_at((*shape[:-2], groups * columns), (*strides[:-2], 1))

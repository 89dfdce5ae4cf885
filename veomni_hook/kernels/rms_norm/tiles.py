"""Host code shared by the Triton kernels of RMSNorm: limits, types, the final sum of weight gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from veomni_hook.accelerator import is_rocm
from veomni_hook.kernels.rms_norm import device as kernels
from veomni_hook.kernels.rms_norm.wide_device import LINE
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, launch_of, power
from veomni_hook.kernels.shared.rows import contiguous_strides, rows_at

__all__ = [
    "LARGE",
    "MOST_COLUMNS",
    "NONE",
    "ONE_PLUS",
    "ONE_PLUS_ROUNDED",
    "WEIGHT",
    "Plan",
    "backward_tile",
    "fetches",
    "plan_of_rows",
    "forward_tile",
    "split",
    "stages_of",
    "summed",
    "warps_of",
    "wide",
]

#: With more columns, a program would run out of registers.
MOST_COLUMNS = 32768
#: The factor of `xhat`, as `device.load_factor` numbers it: none, weight, 1 + weight in float32 or in the
#: weight's dtype.
NONE, WEIGHT, ONE_PLUS, ONE_PLUS_ROUNDED = range(4)
#: From this number of rows on, row numbers do not fit into 32 bits, for which Triton compiles.
LARGE = 1 << 31
#: The minimum columns of the two blocks into which a row may be split. On an H200, backward of 65,536 rows in
#: bfloat16, in one block and in two, reached this share of a copy's bandwidth: 67 and 97 % at 12288 columns,
#: which spill registers in one block; 98 and 95 % at 5120, 95 and 96 % at 6144, 92 and 92 % at 2560.
_SPLIT_FROM, _LEAST_TAIL = 8192, 128
#: Bytes in flight per backward program: with fewer, 5120 columns in one block reach 84 % instead of 98 %. And
#: the minimum number of tiles: two of 12288 columns, in two blocks, reach 79 %, three 97 %.
_IN_FLIGHT, _FEWEST_TILES = 96 << 10, 3
#: The most columns of rows that a backward program holds in registers; wider rows are read twice, in parts.
#: On an H200, bfloat16, rows held so reached 60, 52, 27, 14 and 16 % of a copy's bandwidth at 16384, 20480,
#: 24576, 28672 and 32768 columns.
_WHOLE_COLUMNS = 12288
#: For rows of at most so many columns: a part, the warps of a program, and whether the next row is fetched
#: ahead. They were the best of twelve ways there: 92, 89, 86, 79 and 75 %. Two programs a processor were no
#: faster.
_PARTS = (
    (16384, 4096, 8, True),
    (20480, 4096, 16, True),
    (28672, 8192, 16, True),
    (MOST_COLUMNS, 4096, 8, False),
)
#: Tile of a program in the final sum, over the programs of a backward.
_SUMMED_COLUMNS, _SUMMED_ROWS = 32, 64
_A_WARPS_ELEMENTS = 1024
#: Elements per program: the best sizes tried on an H200 at each width, within 2 % of the bandwidth; the hint
#: evict_first cost 4 %. Wide rows of a power of 2 are processed four or two at a time, others one at a time.
_FORWARD_TILE, _FORWARD_WIDE_TILE, _SUM_WIDE_TILE, _BACKWARD_TILE = 2048, 16384, 8192, 8192
_WIDE = 4096


class Wide(NamedTuple):
    """How a backward program processes a row in parts.

    Attributes:
        block: the columns of a part, a power of two.
        parts: of a row.
        warps: of a program.
        lines: a power of two, the lines of memory that hold a row; 0 if none is fetched ahead.
    """

    block: int
    parts: int
    warps: int
    lines: int


class Plan(NamedTuple):
    """A launch for the shapes and strides of a call, and what surrounds it.

    Attributes:
        launch: None if there is nothing to compute.
        grid: of the launch.
        numbers: the arguments after the tensors, up to eps.
        kept: the sizes and strides of what the forward keeps of each row; in a backward, of the parts of the
            parameters' gradients.
        like: the result has the strides of x.
    """

    launch: Launch | None
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    kept: tuple[tuple[int, ...], tuple[int, ...]]
    like: bool


def plan_of_rows(
    function: Any,
    kind: tuple[torch.device, tuple[torch.dtype | None, ...]],
    shape: torch.Size,
    strides: Sequence[tuple[int, ...]],
    kept: tuple[int, ...],
    tensors: int,
    *steps: object,
) -> Plan | None:
    """Return the plan of a forward that reads rows, or None if they must be copied first.

    Args:
        function: the device code. Its constants: the columns, their block, the rows of a program, ``steps``.
        kind: where it runs, and the dtypes of its tensors, results among them.
        shape: of x, or of both addends.
        strides: of x, or of each addend.
        kept: the sizes of what is kept of the rows.
        tensors: how many the function takes.
        steps: its last constants.
    """
    places = [place for place in (rows_at(shape, stride) for stride in strides) if place is not None]
    if len(places) < len(strides):
        return None
    columns, rows = shape[-1], prod(shape[:-1])
    layout = kept, contiguous_strides(kept)
    like = strides[0] == contiguous_strides(shape)
    if not columns or not rows:
        return Plan(None, (0, 0, 0), (), layout, like)
    block, tile = power(columns), forward_tile(columns, of_sum=len(strides) > 1)
    size = tile // block
    launch = launch_of(
        (kind, *places, rows >= LARGE), function, tensors, columns, block, size, *steps,
        num_warps=warps_of(tile),
    )  # fmt: skip
    numbers = rows, *(number for place in places for number in place)
    return Plan(launch, (cdiv(rows, size), 1, 1), numbers, layout, like)


def fetches(device: torch.device) -> bool:
    """Whether programs can fetch a row before they load it: an instruction of NVIDIA's."""
    return device.type == "cuda" and not is_rocm()


def split(columns: int) -> tuple[int, int]:
    """The column blocks of a row, powers of two: one and 0, or a larger and a smaller one.

    Two if the larger has at least 8192 columns, and both together are a quarter smaller than a single one.
    """
    block = power(columns)
    head = block // 2
    tail = max(_LEAST_TAIL, power(columns - head)) if columns > head else 0
    return (head, tail) if _SPLIT_FROM <= head and tail <= head // 2 else (block, 0)


def wide(columns: int, size: int, *, fetched: bool) -> Wide | None:
    """How a backward program processes a row in parts; None if it does so as a whole.

    Args:
        columns: the length of a row.
        size: bytes of the larger element of x and dy.
        fetched: whether rows can be fetched ahead.
    """
    if columns <= _WHOLE_COLUMNS:
        return None
    block, warps, ahead = next(rest for most, *rest in _PARTS if columns <= most)
    lines = power(cdiv(columns * size, LINE.value)) if ahead and fetched else 0
    return Wide(block, cdiv(columns, block), warps, lines)


def forward_tile(columns: int, *, of_sum: bool = False) -> int:
    """The elements of a forward program: one row or several, each in a block of a power of two.

    ``of_sum``: the rows are those of two addends.
    """
    block = power(columns)
    wide_tile = _SUM_WIDE_TILE if of_sum else _FORWARD_WIDE_TILE
    return max(block, wide_tile if columns == block >= _WIDE else _FORWARD_TILE)


def backward_tile(columns: int) -> int:
    """The elements of a step of a backward program: one row or several, each in a block of a power of two."""
    return max(power(columns), _BACKWARD_TILE)


def warps_of(tile: int, elements: int = _A_WARPS_ELEMENTS) -> int:
    """The number of warps of a program, which process ``elements`` of its tile each."""
    return max(4, min(32, tile // elements))


def stages_of(tile: int, elements: int, size: int, memory: int) -> int:
    """The number of tiles that a program loads ahead: enough bytes in flight, as far as memory allows.

    Args:
        tile: capacity of a tile in elements.
        elements: elements that a tile actually holds.
        size: bytes loaded per element.
        memory: bytes that a program may stage.
    """
    wanted = max(_FEWEST_TILES, cdiv(_IN_FLIGHT, elements * size))
    return max(1, min(wanted, memory // (tile * size)))


def summed(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the rows of ``partial`` ``[programs, columns]``, float32, in ``dtype``: one kernel."""
    programs, columns = partial.shape
    total = torch.empty(columns, dtype=dtype, device=partial.device)
    grid = (-(-columns // _SUMMED_COLUMNS), 1, 1)
    _sum_launch(partial.device, dtype, columns)(grid, partial, total, programs)
    return total


@lru_cache(maxsize=LAUNCHES)
def _sum_launch(device: torch.device, dtype: torch.dtype, columns: int) -> Launch:
    return Launch(kernels.add_up, 2, columns, _SUMMED_COLUMNS, _SUMMED_ROWS, num_warps=4)

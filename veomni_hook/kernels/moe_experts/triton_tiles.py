"""Tiles of experts' products: a few configurations, chosen by shape and by what the device supports."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared.launch import enter_context, generation, room

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

__all__ = [
    "Tile",
    "describable",
    "described",
    "float8_weight_tile",
    "gradient_tile",
    "grid",
    "product_tile",
    "row_block",
    "shared_memory",
    "weight_tile",
    "worth_ordering",
]

Tensor = torch.Tensor

# Shared memory in bytes for four stages of 128 x 256, including overhead.
_WIDE_BYTES = 200 * 1024
# With fewer columns, copies are not worth their memory.
_WORTH_ORDERING = 4096


class Tile(NamedTuple):
    """A configuration: rows, columns and depth of a tile, warps, stages, tiles of rows that share columns.

    ``flatten`` merges the loops over tiles and depth, so that a tile's results are written while the next
    tile's operands load. ``parts``: column parts that a backward epilogue processes one by one. ``programs``:
    programs per multiprocessor; 0 starts one program per tile.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    programs: int = 1
    flatten: bool = False
    parts: int = 1
    described: bool = True


def row_block(pairs: int, num_experts: int, element: int) -> int:
    """Rows of a tile, by the average per expert: a half-empty tile costs as much as a full one.

    In the batch-invariant mode always the same: with fewer rows, other instructions add otherwise.
    """
    average = pairs // max(1, num_experts)
    largest = 128 if element == 2 else 64
    if STATE.choice.invariant:
        return largest
    for block in (16, 32, 64):
        if average <= block:
            return min(block, largest)
    return largest


def worth_ordering(x: Tensor, dtype: torch.dtype, pairs: int, num_experts: int, inner: int) -> bool:
    """Whether to copy rows of ``x`` into experts' order for products in ``dtype``, with ``inner`` columns.

    Descriptors can load rows only in order. On an H200 they saved 17 to 21 % of the time of the first
    weight's gradient compared with gathered rows, 9 % of the second's, and 3 to 5 % of the first product and
    the gradients of gate and up. A copy takes as long as about 350 columns of a product, and no more bytes
    than the second gradient. It gained nothing at 768 columns of 128 experts.
    """
    if dtype.itemsize != 2 or x.shape[1] * 2 % 16 or (x.is_cuda and not _describes(x.device)):
        return False
    return inner >= _WORTH_ORDERING and pairs <= inner * num_experts


def product_tile(piece: str, block: int, x: Tensor) -> Tile:
    """The configuration of a product of rows; a column of gates and one of ups count as one."""
    tile = _tile_of_16_bits(piece, block, x)
    if x.element_size() > 1:
        return tile
    # As many bytes. On an H200, a fourth stage gained 5 and 11 % of the rows of dx (128 experts of 2,048 x
    # 768, 32 of 7,168 x 2,048), and cost the forward's products 1 to 14 %.
    stages = tile.stages if piece == "input_gradient" else min(tile.stages, 3)
    return tile._replace(depth=2 * tile.depth, stages=stages)


def _tile_of_16_bits(piece: str, block: int, x: Tensor) -> Tile:
    paired = piece == "gate_up"
    if x.element_size() == 4:
        return Tile(block, 32, 32, 4, 2, described=False)
    if block >= 128 and not _roomy(x):
        return Tile(block, 64 if paired else 128, 32, 8, 3, parts=2)
    if block >= 128 and piece == "gate_up_backward":
        # `flatten`, or 128 columns, cost this product 50 %: its epilogue is long.
        return Tile(block, 256, 64, 8, 3, programs=0, parts=4)
    if block >= 128:
        # After Hopper, results of odd widths also need 64 KiB of shared memory.
        return Tile(block, 128 if paired else 256, 64, 8, 4 if _hopper(x) else 3, flatten=True)
    if block == 64 and paired:
        return Tile(64, 128, 64, 8, 4 if _roomy(x) else 3)
    # Few rows: speed depends on how many bytes of weights are in flight.
    depth = 64 if block == 64 or not _roomy(x) else 128
    stages = 4 if block == 16 or (block == 64 and piece != "gate_up_backward") else 3
    return Tile(block, 64 if paired else 128, depth, 4, stages, programs=2, parts=2)


def gradient_tile(block: int, dout: Tensor, *, transposed: bool) -> Tile:
    """The configuration of the product whose epilogue computes the gradients of gate and up."""
    tile = product_tile("gate_up_backward", block, dout)
    # A transposed weight of the second product leaves fewer registers.
    if tile.rows >= 128 and transposed:
        return tile._replace(parts=2 * tile.parts)
    return tile


def weight_tile(left: Tensor, right: Tensor, gathered: tuple[bool, bool]) -> Tile:
    """The configuration of a weight's gradient; at most one operand is ``gathered``."""
    if left.element_size() == 4:
        return Tile(32, 32, 32, 4, 2)
    if not _roomy(left):
        return Tile(128, 128, 32, 8, 5)
    if not any(gathered):
        return Tile(128, 256, 64, 8, 3)
    # Two loads of the gathered operand depend on each other, so seven stages hold four slabs. If Triton
    # cannot prove that hardware may copy its rows, each stage holds a slab of the other one: 242 KiB.
    stages = 7 if _copied(left if gathered[0] else right) else 5
    # The gathered operand is the narrow one, and its tiles are processed consecutively.
    return Tile(128, 256, 64, 8, stages) if gathered[0] else Tile(256, 128, 64, 8, stages, group=1)


def float8_weight_tile(x: Tensor) -> Tile:
    """The configuration of a weight's gradient in float8."""
    return Tile(128, 256, 128, 8, 3) if _roomy(x) else Tile(128, 128, 64, 8, 3)


def _copied(rows: Tensor) -> bool:
    """Whether Triton can prove that 16-byte pieces are aligned to 16 bytes."""
    return all(number % 16 == 0 for number in (rows.data_ptr(), rows.stride(0), rows.shape[1]))


def _roomy(x: Tensor) -> bool:
    """Whether the stages of wide tiles fit into shared memory, as on Hopper."""
    return not x.is_cuda or shared_memory(x.device.index) >= _WIDE_BYTES


@cache
def shared_memory(device_index: int) -> int:
    """Return how many bytes of shared memory a program may have."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    return int(properties.shared_memory_per_block_optin)


def _hopper(x: Tensor) -> bool:
    return not x.is_cuda or generation(x.device) == 9


def _describes(device: torch.device) -> bool:
    return TensorDescriptor is not None and generation(device) >= 9


def grid(x: Tensor, tile: Tile, tiles: int) -> tuple[int]:
    """The number of programs that loop over the tiles."""
    if not x.is_cuda or not tile.programs:
        # The interpreter runs programs one by one.
        return (min(tiles, 3) if not x.is_cuda else tiles,)
    return (min(tiles, tile.programs * room(x.device)[0]),)


def describable(tensor: Tensor, tile: Tile) -> bool:
    """Whether hardware can copy tiles of the tensor by descriptor."""
    if not tile.described or TensorDescriptor is None:
        return False
    if tensor.is_cuda and not _describes(tensor.device):
        return False
    element = tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and all(stride > 0 and stride * element % 16 == 0 for stride in tensor.stride()[:-1])
        and tensor.data_ptr() % 16 == 0
        and tensor.numel() > 0
    )


def described(tensor: Tensor, block: list[int]) -> Any:
    """Return a descriptor of tiles of a `describable` tensor, for a launch in this thread."""
    enter_context(tensor)
    return TensorDescriptor.from_tensor(tensor, block)

"""Which row goes to which expert: pairs of a token and one of its places, sorted by expert.

Nothing is read by the host, and nothing depends on the order in which programs run: the sort is stable, so
rows of one expert stand in the order of their pairs. Two launches around one sort.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from veomni_hook.kernels.moe_experts import routing_device

__all__ = ["Routing", "route"]

Tensor = torch.Tensor

_KEY_BLOCK, _BLOCK, _TILES = 1024, 512, 8
_MOST_PAIRS = 2**31 - 2**20


class Routing(NamedTuple):
    """The rows of one call; pair ``p`` is place ``p % top_k`` of token ``p // top_k``.

    Rows from ``offsets[num_experts]`` on belong to pairs of no expert; nothing reads or writes them.

    Attributes:
        num_tokens: of the call.
        top_k: places a token.
        num_experts: experts that have weights.
        block: rows of a tile.
        most: an upper bound of the number of tiles.
        ids: [tokens, top_k] as they came, contiguous.
        tokens: [total], the token of a row; this and what follows in int32, at least as long as said.
        pairs: [total], the pair of a row.
        rows_of: [total], the row of a pair.
        offsets: [num_experts + 1], where the rows of each expert begin.
        tiles: [3 * most + 1]: expert, first row and end of each tile, then how many there are.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    block: int
    most: int
    ids: Tensor
    tokens: Tensor
    pairs: Tensor
    rows_of: Tensor
    offsets: Tensor
    tiles: Tensor

    @property
    def total(self) -> int:
        """How many pairs there are, those of no expert included."""
        return self.num_tokens * self.top_k


def route(ids: Tensor, num_experts: int, block: int) -> Routing:
    """Sort the pairs of ``ids`` [tokens, top_k] (integers) into tiles of ``block`` rows of one expert.

    An id that is no expert's, such as the sentinel ``num_experts``, adds nothing anywhere.

    Raises:
        ValueError: more pairs than 32 bits can number.
    """
    num_tokens, top_k = ids.shape
    total = num_tokens * top_k
    if total > _MOST_PAIRS:
        raise ValueError(f"{total} pairs of tokens and places: rows are numbered in 32 bits; split the batch")
    ids = ids.contiguous()
    most = -(-total // block) + min(num_experts, total) if num_experts else 0
    # One piece of memory: an allocation costs the host more than a view. Parts begin at 16 bytes.
    sizes = [-(-size // 4) * 4 for size in (total, total, total, num_experts + 1, 3 * most + 1)]
    numbers = torch.empty(sum(sizes), dtype=torch.int32, device=ids.device)
    parts = torch.split(numbers, sizes)
    routing = Routing(num_tokens, top_k, num_experts, block, most, ids, *parts)
    if most == 0:
        numbers.zero_()
        return routing
    # The sort's time grows with the bits of a key.
    keys = torch.empty(total, dtype=_key_dtype(num_experts), device=ids.device)
    routing_device.routing_keys[(triton.cdiv(total, _KEY_BLOCK),)](ids, keys, total, num_experts, _KEY_BLOCK)
    keys, order = torch.sort(keys, stable=True)
    programs = max(triton.cdiv(total, _BLOCK), triton.cdiv(most, _TILES))
    routing_device.routing_tables[(programs,)](
        keys, order, *parts, total, num_experts, most, top_k, total.bit_length(),
        triton.next_power_of_2(num_experts), block, _BLOCK, _TILES, num_warps=4,
    )  # fmt: skip
    return routing


def _key_dtype(num_experts: int) -> torch.dtype:
    if num_experts < 2**8:
        return torch.uint8
    return torch.int16 if num_experts < 2**15 else torch.int32

"""Assigns rows to experts: pairs of a token and one of its places, sorted by expert.

The host reads nothing, and the result does not depend on the order in which programs run: the sort is
stable, so rows of one expert keep the order of their pairs. Two launches around one sort, which is several
launches itself; few pairs take one launch in all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.moe_experts import routing_device
from veomni_hook.kernels.moe_experts.torch_routing import assigned
from veomni_hook.kernels.shared.host_values import known_derived
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power

__all__ = ["Routing", "numbers_of", "route", "routing_of"]

Tensor = torch.Tensor

_KEY_BLOCK, _BLOCK, _TILES = 1024, 512, 8
_MOST_PAIRS = 2**31 - 2**20
_LEAST_BLOCK = 16
#: From so many pairs on they are sorted; fewer are compared with each other, which takes one launch.
#: On an H200 with 128 experts, 256 pairs take the device 15 us both ways, and the host 17 us instead of 57;
#: 408 pairs take the device 26 us and 16.
_MANY = 257
_FEW_BLOCK, _FEW_TILES, _COMPARED = 64, 64, 16384


class Routing(NamedTuple):
    """The rows of one call; pair ``p`` is place ``p % top_k`` of token ``p // top_k``.

    Rows from ``offsets[num_experts]`` on belong to pairs without an expert; nothing reads or writes them.

    Attributes:
        num_tokens: tokens in the call.
        top_k: places per token.
        num_rows: how many rows are allocated: all pairs, or those with an expert if their number is known.
        num_experts: experts that have weights.
        block: rows per tile.
        max_tiles: an upper bound of the number of tiles.
        ids: [tokens, top_k] as given, contiguous.
        numbers: one buffer with all tables below; `routing_of` rebuilds them from it.
        tokens: [num_pairs], the token of a row; this and the tables below are int32 and may be longer.
        pairs: [num_pairs], the pair of a row.
        rows_of: [num_pairs], the row of a pair.
        offsets: [num_experts + 1], the first row of each expert.
        experts: [4 * num_experts], those with most rows first: expert, first row, end and first tile of each.
        tiles: [3 * max_tiles + 1]: expert, first row and end of each tile, then how many there are.
    """

    num_tokens: int
    top_k: int
    num_rows: int
    num_experts: int
    block: int
    max_tiles: int
    ids: Tensor
    numbers: Tensor
    tokens: Tensor
    pairs: Tensor
    rows_of: Tensor
    offsets: Tensor
    experts: Tensor
    tiles: Tensor

    @property
    def num_pairs(self) -> int:
        """The number of pairs, including those without an expert."""
        return self.num_tokens * self.top_k


def numbers_of(pairs: Any, num_experts: Any) -> Any:
    """How many numbers `route` writes; ``pairs`` may be symbolic: no branch depends on a shape."""
    # Tiles of at least 16 rows, and every part rounded up to 16 bytes.
    return 3 * pairs + 3 * (pairs // _LEAST_BLOCK + num_experts + 1) + 5 * num_experts + 24


def routing_of(numbers: Tensor, ids: Tensor, num_experts: int, block: int, num_rows: int) -> Routing:
    """Return what `route` returned for the same operands, from its ``numbers``."""
    num_tokens, top_k = ids.shape
    num_pairs = num_tokens * top_k
    max_tiles = -(-num_pairs // block) + min(num_experts, num_pairs) if num_experts else 0
    # One buffer: an allocation costs the host more than a view. Parts are aligned to 16 bytes.
    sizes = (num_pairs, num_pairs, num_pairs, num_experts + 1, 4 * num_experts, 3 * max_tiles + 1)
    aligned = [-(-size // 4) * 4 for size in sizes]
    parts = torch.split(numbers, [*aligned, numbers.shape[0] - sum(aligned)])[:-1]
    return Routing(
        num_tokens, top_k, num_rows, num_experts, block, max_tiles, ids.contiguous(), numbers, *parts
    )


def route(ids: Tensor, num_experts: int, block: int) -> Routing:
    """Sort the pairs of ``ids`` [tokens, top_k] (integers) into tiles of ``block`` rows of one expert.

    An id without an expert, such as the sentinel ``num_experts``, adds nothing. If it is known how many are
    `assigned`, rows are allocated for these alone.

    Raises:
        ValueError: more pairs than 32 bits can number.
    """
    num_pairs = ids.numel()
    if num_pairs > _MOST_PAIRS:
        raise ValueError(
            f"{num_pairs} pairs of tokens and experts exceed 32-bit row numbers; split the batch"
        )
    numbers = torch.empty(numbers_of(num_pairs, num_experts), dtype=torch.int32, device=ids.device)
    routing = routing_of(numbers, ids, num_experts, block, num_pairs)
    _write(routing)
    # Asked last: the host may wait for it, and the tables are made meanwhile.
    known = known_derived(ids, assigned, num_experts)
    return routing if known is None else routing._replace(num_rows=known)


def _write(routing: Routing) -> None:
    ids, num_experts, block, max_tiles = routing.ids, routing.num_experts, routing.block, routing.max_tiles
    num_pairs = routing.num_pairs
    if max_tiles == 0:
        routing.numbers.zero_()
        return
    if num_pairs < _MANY:
        _launch_of_few(ids.device, ids.dtype, num_experts, routing.top_k, block)(
            (max(cdiv(num_pairs, _FEW_BLOCK), cdiv(max(max_tiles, num_experts), _FEW_TILES)), 1, 1),
            routing.ids, routing.tokens, routing.pairs, routing.rows_of, routing.offsets, routing.experts,
            routing.tiles, num_pairs, num_experts, max_tiles, routing.top_k,
        )  # fmt: skip
        return
    # The sort's time grows with the bits of a key.
    keys = torch.empty(num_pairs, dtype=_key_dtype(num_experts), device=ids.device)
    write_keys, write_tables = _launches(ids.device, ids.dtype, num_experts, routing.top_k, block)
    write_keys((cdiv(num_pairs, _KEY_BLOCK), 1, 1), routing.ids, keys, num_pairs, num_experts)
    keys, order = torch.sort(keys, stable=True)
    write_tables(
        (max(cdiv(num_pairs, _BLOCK), cdiv(max(max_tiles, num_experts), _TILES)), 1, 1),
        keys, order, routing.tokens, routing.pairs, routing.rows_of, routing.offsets, routing.experts,
        routing.tiles, num_pairs, num_experts, max_tiles, routing.top_k, num_pairs.bit_length(),
    )  # fmt: skip


@lru_cache(maxsize=LAUNCHES)
def _launches(
    device: torch.device, ids: torch.dtype, num_experts: int, top_k: int, block: int
) -> tuple[Launch, Launch]:
    """Return the launchers before and after the sort, for these Triton specialisations."""
    constants = power(num_experts), block, _BLOCK, _TILES
    return (
        Launch(routing_device.routing_keys, 2, _KEY_BLOCK),
        Launch(routing_device.routing_tables, 8, *constants, num_warps=4),
    )


@lru_cache(maxsize=LAUNCHES)
def _launch_of_few(
    device: torch.device, ids: torch.dtype, num_experts: int, top_k: int, block: int
) -> Launch:
    """Return the launcher of `routing_of_few` for these Triton specialisations."""
    experts = power(num_experts)
    chunk = max(1, min(128, _COMPARED // experts))
    return Launch(
        routing_device.routing_of_few, 7, experts, block, _FEW_BLOCK, chunk, _FEW_TILES, num_warps=8
    )


def _key_dtype(num_experts: int) -> torch.dtype:
    if num_experts < 2**8:
        return torch.uint8
    return torch.int16 if num_experts < 2**15 else torch.int32

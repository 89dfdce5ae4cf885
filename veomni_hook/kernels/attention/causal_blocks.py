"""The blocks of a causal mask, or of a causal window, for ``flex_attention``; no dense mask is read.

A block of queries and a block of keys see each other by their distance alone: at distance 0 in part; then,
up to ``near``, every query sees every key; then, up to ``far``, in part; beyond that, nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

__all__ = ["causal_blocks"]

_BLOCK = 128


def causal_blocks(length: int, keys: int, device: torch.device) -> BlockMask:
    """Return the mask under which each query sees the last ``keys`` keys up to its position; 0: all of them.

    ``length`` is the number of queries, and of keys. dynamo traces this function; ``length`` may be a symbol.
    """
    count = (length + _BLOCK - 1) // _BLOCK
    near, far = (count, count) if keys == 0 else (max(keys // _BLOCK - 1, 0), (keys + _BLOCK - 2) // _BLOCK)

    def is_visible(batch: object, head: object, query: Any, key: Any) -> Any:
        return query >= key if keys == 0 else (query >= key) & (query - key < keys)

    own = torch.arange(count, dtype=torch.int32, device=device)
    kv_partial, kv_full = _lists(own, -1, near, far)
    q_partial, q_full = _lists(own, 1, near, far)
    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=kv_partial[0],
        kv_indices=kv_partial[1],
        full_kv_num_blocks=kv_full[0],
        full_kv_indices=kv_full[1],
        q_num_blocks=q_partial[0],
        q_indices=q_partial[1],
        full_q_num_blocks=q_full[0],
        full_q_indices=q_full[1],
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=is_visible,
    )


Lists = tuple[torch.Tensor, torch.Tensor]


def _lists(own: torch.Tensor, direction: int, near: int, far: int) -> tuple[Lists, Lists]:
    """Return the partial and the full blocks that each block sees before (-1) or after it (1).

    Each as numbers ``[1, 1, blocks]`` and places ``[1, 1, blocks, blocks]``, of which so many count.
    """
    last = own.shape[0] - 1
    room = own if direction < 0 else last - own
    rows, slots = own[:, None], own[None, :]
    full_number = room.clamp(max=near)
    partial_number = 1 + (room.clamp(max=far) - near).clamp(min=0)
    full = rows + direction * (1 + slots)
    partial = torch.where(slots == 0, rows, rows + direction * (near + slots))
    return tuple(  # type: ignore[return-value]
        (number.int()[None, None], places.clamp(0, last).int()[None, None])
        for number, places in ((partial_number, partial), (full_number, full))
    )

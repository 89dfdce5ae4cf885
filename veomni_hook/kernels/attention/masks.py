"""The dense masks of upstream's eager attention, and which blocks of them a kernel can skip.

A kernel reads a dense mask as yes or no, so it must know that the mask holds nothing but 0 and the smallest
number. This is certain of what transformers' ``eager_mask`` returns. `watch` registers a function in its
place that calls it and remembers the mask: by identity, and with its version, so that a copy, a slice, or a
mask that was changed in place is unknown. Whatever else reads the mask gets upstream's tensor.

The layers of a model share a mask, so its blocks are computed once.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BLOCK", "Blocks", "Mask", "in_order", "known", "watch"]

#: The width of a block: what ``flex_attention`` uses by default, for queries and keys.
BLOCK = 128
_NAME = "eager"


class Blocks(NamedTuple):
    """A mask as ``flex_attention`` takes it.

    Attributes:
        mask: the blocks; its ``mask_mod`` reads the dense mask in those that are visible in part.
        sees: ``[batch, queries]``, 1 where a query sees a key and 0 where it sees none, in float32; None if
            each query sees one.
    """

    mask: BlockMask
    sees: torch.Tensor | None


class Mask:
    """A mask that ``eager_mask`` returned.

    Args:
        dense: the mask, ``[batch, 1, queries, keys]``; held weakly.
        gone: called when the mask is deleted.
    """

    def __init__(self, dense: torch.Tensor, gone: Any) -> None:
        self.dense = ref(dense, gone)
        self._version = dense._version
        self._blocks: dict[bool, Blocks] = {}

    def is_unchanged(self) -> bool:
        """Return whether nobody has written to the mask since."""
        dense = self.dense()
        return dense is not None and dense._version == self._version

    def blocks(self, *, uniform: bool) -> Blocks:
        """Return the blocks of the mask.

        ``uniform``: a query that sees no key sees all of them, with equal weights. That is what eager
        attention computes for it, because all its scores are the smallest number.
        """
        blocks_of_mask = self._blocks.get(uniform)
        if blocks_of_mask is None:
            dense = self.dense()
            assert dense is not None  # noqa: S101 - the caller holds it
            blocks_of_mask = self._blocks[uniform] = _blocks(dense, uniform=uniform)
        return blocks_of_mask


_KNOWN: dict[int, Mask] = {}


def watch(*_: object) -> None:
    """Remember the masks that transformers' ``eager_mask`` returns from now on, in all models."""
    module = sys.modules.get("transformers.masking_utils")
    functions: Any = getattr(module, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    upstream = None if functions is None else functions._global_mapping.get(_NAME)
    if upstream is None or hasattr(upstream, "veomni_watched"):
        return

    @wraps(upstream)
    def eager_mask(*args: object, **kwargs: object) -> Any:
        mask = upstream(*args, **kwargs)
        if not torch.compiler.is_compiling():
            _remember(mask)
        return mask

    # The inserted code that notes masks asks where the function comes from.
    vars(eager_mask)["veomni_watched"] = upstream
    functions.register(_NAME, eager_mask)


def known(dense: torch.Tensor) -> Mask | None:
    """Return what is known of a mask, or None if ``eager_mask`` did not return this tensor."""
    mask = _KNOWN.get(id(dense))
    return mask if mask is not None and mask.dense() is dense else None


def _remember(mask: object) -> None:
    # Tensors of inference mode have no version that would tell a change in place.
    if type(mask) is torch.Tensor and mask.dim() == 4 and not (mask.is_meta or mask.is_inference()):
        key = id(mask)
        _KNOWN[key] = Mask(mask, lambda gone: _forget(key, gone))


def _forget(key: int, gone: object) -> None:
    # Another tensor may have this id by now.
    if (mask := _KNOWN.get(key)) is not None and mask.dense is gone:
        del _KNOWN[key]


def _blocks(dense: torch.Tensor, *, uniform: bool) -> Blocks:
    visible = (dense == 0)[:, 0]
    queries, keys = visible.shape[-2:]
    sees = visible.any(-1)
    if uniform:
        visible = visible | ~sees[..., None]
    padded = functional.pad(visible, (0, -keys % BLOCK, 0, -queries % BLOCK))
    shape = (len(visible), padded.shape[-2] // BLOCK, BLOCK, padded.shape[-1] // BLOCK, BLOCK)
    counts = padded.view(shape).sum((2, 4))[:, None]
    full = counts == BLOCK * BLOCK

    def is_visible(batch: Any, head: object, query: Any, key: Any) -> Any:
        return visible[batch, query, key]

    mask = BlockMask.from_kv_blocks(
        *in_order((counts > 0) & ~full),
        *in_order(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(queries, keys),
    )
    return Blocks(mask, sees.float())


def in_order(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row of blocks, how many are true, and all indices, those of true blocks first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)

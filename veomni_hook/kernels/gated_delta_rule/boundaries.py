"""The samples of a model call that share rows: found once, in front of the loop over layers.

Layers get them as ``cu_seq_lens_q``, upstream's own argument.
"""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared.host_values import host_copy
from veomni_hook.kernels.shared.samples import boundaries
from veomni_hook.kernels.shared.separation import given_in, traced

__all__ = ["found"]

#: Rows of positions for text, time, height and width, as multimodal models make them.
_WITH_TEXT = 4
#: Positions of a row that samples can share.
_FEWEST = 2


def found(
    owner: Any,
    kwargs: dict[str, Any],
    position_ids: Any,
    attention_mask: Any,
    past_key_values: Any,
    inputs: Any,
) -> dict[str, Any]:
    """Return the arguments that a model hands to its layers, with the boundaries of samples that share rows.

    Boundaries in ``kwargs`` (``cu_seq_lens_q``, ``seq_idx``) stay as they are. Else a sample begins where
    ``position_ids`` do not count on, as for transformers' masks of packed sequences. They are read once a
    call, so the host waits for the device. Positions that a 2D ``attention_mask`` leaves out begin no sample.
    A call that continues a cache has no boundaries. Compiled code cannot read values, so there an assertion
    on the device fails if samples share a row.

    Args:
        owner: the model.
        kwargs: the arguments without a name in its forward; not changed.
        position_ids: ``[rows or 1, positions]``, or ``[3 or 4, rows, positions]``, or None.
        attention_mask: ``[rows, positions]``, or anything else, which is not read.
        past_key_values: the cache, or None.
        inputs: ids or embeddings, ``[rows, positions, ...]``, or None.
    """
    known = not STATE.active or inputs is None or inputs.shape[1] < _FEWEST or given_in(kwargs)
    if known or not isinstance(position_ids, torch.Tensor) or position_ids.dim() not in (2, 3):
        return kwargs
    mask = attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2 else None
    if traced():
        # An exported program has to run wherever its operators do.
        if past_key_values is None and not getattr(torch.compiler, "_is_exporting_flag", False):
            _assert_one_sample_a_row(position_ids, mask, owner)
        return kwargs
    if past_key_values is not None and int(past_key_values.get_seq_length()) > 0:
        return kwargs
    rows, positions = inputs.shape[:2]
    begins = _begins(host_copy(position_ids)).expand(rows, positions)
    if mask is not None and bool(begins.any()):
        begins = _attended(begins, host_copy(mask))
    starts = begins.flatten().nonzero().flatten().tolist()
    if not starts:
        return kwargs
    ends = sorted({*starts, *range(0, rows * positions + 1, positions)})
    return {**kwargs, "cu_seq_lens_q": boundaries(ends, inputs.device)}


def _begins(position_ids: torch.Tensor) -> torch.Tensor:
    """Return ``[rows or 1, positions]``: whether a position begins another sample than the one before it."""
    if position_ids.dim() == 3 and position_ids.shape[0] != _WITH_TEXT:
        # Time stands still within an image, and all three are 0 only at a sample's first position.
        begins = (position_ids == 0).all(0)
        begins[:, 1:] |= position_ids[0].diff(dim=-1) < 0
    else:
        text = position_ids[0] if position_ids.dim() == 3 else position_ids
        begins = torch.zeros_like(text, dtype=torch.bool)
        begins[:, 1:] = text.diff(dim=-1) != 1
    begins[:, 0] = False
    return begins


def _attended(begins: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return which of these positions the mask keeps, behind another one that it keeps."""
    kept = mask[:, -begins.shape[1] :] != 0
    return begins & kept & (kept.cumsum(1) > 1)


def _assert_one_sample_a_row(position_ids: torch.Tensor, mask: torch.Tensor | None, owner: Any) -> None:
    begins = _begins(position_ids)
    if mask is not None:
        begins = _attended(begins, mask)
    torch._assert_async(
        ~begins.any(),
        f"position_ids show samples that share a row, which compiled code of {type(owner).__name__} cannot"
        " keep apart: pass cu_seq_lens_q or seq_idx as well",
    )

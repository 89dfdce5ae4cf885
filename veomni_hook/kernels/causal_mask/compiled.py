"""What the patched ``transformers.masking_utils`` asks while dynamo traces: is a mask needed?

transformers decides this by the values of tensors, and builds a mask whenever it traces. The answers here use
only what is known while tracing: that there is no padding mask, the lengths, and how the position ids were
made (`veomni_hook.kernels.causal_mask.positions`). Where that is not enough, the answer is False, and
upstream's code runs. While a program is exported, every answer is False: upstream builds a mask then, as
``is_causal`` would be fixed for all inputs.

dynamo traces the functions of ``__all__``. They add no guards but those of the comparisons of lengths, which
transformers makes itself without ``torch.compile``, and of the choice of kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.kernels.causal_mask.positions import counts_up
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing
from veomni_hook.kernels.shared.traced_graph import is_exporting, node_of

__all__ = ["is_causal_suffices", "is_one_sequence", "needs_no_mask"]


def is_causal_suffices(
    padding_mask: object, query_length: Any, kv_length: Any, window: Any = None, query_offset: object = 0
) -> bool:
    """Return whether attention with ``is_causal`` alone equals attention with the causal mask.

    ``window`` is the length from which a sliding window or a chunk needs a mask; None: there is neither.
    """
    if padding_mask is not None or isinstance(query_offset, torch.Tensor) or not _answers():
        return False
    # Not `in`: the lengths are symbols, which compare by a guard.
    whole = query_length == 1 or kv_length == query_length  # noqa: PLR1714
    return whole and (window is None or kv_length < window)


def needs_no_mask(padding_mask: object, kv_length: Any, window: Any = None) -> bool:
    """Return whether attention without a mask equals attention with the bidirectional mask."""
    if padding_mask is not None or not _answers():
        return False
    return window is None or kv_length < window


def is_one_sequence(position_ids: object) -> bool:
    """Return whether every row of ``position_ids`` is known to be one sequence: no packing."""
    return _answers() and _counts_up()


def _answers() -> bool:
    # `STATE` is read in traced code, so that code compiled before a change of the choice does not outlive it.
    return STATE.answering and not is_exporting()


@answered_while_tracing
def _counts_up() -> bool:
    """Return `counts_up` for the argument of the `is_one_sequence` that dynamo is tracing."""
    ids = node_of("position_ids")
    return ids is not None and counts_up(ids)

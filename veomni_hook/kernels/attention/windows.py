"""Which masks are a causal sliding window and nothing else.

A dense mask does not tell what it is made of, and reading it would make the host wait. So the patched
function that creates masks of sliding windows notes it in an attribute of the tensor. Everything still reads
upstream's mask. A slice or any other result has no such attribute, and the version tells a mask that was
changed in place. While dynamo traces, the note is in its graph (`traced_masks`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from veomni_hook.kernels.attention import traced_masks
from veomni_hook.kernels.shared.host_values import traced

__all__ = ["note_window", "window_of"]

_ATTRIBUTE = "_veomni_window"  # also in the guard that `veomni_hook.patches.idioms.attention.window` writes
_DEVICES = ("cuda",)


def note_window(mask: Any, padding_mask: Any, window: int) -> None:
    """Note that ``mask`` shows each query the last ``window`` keys up to its own position.

    Call it where nothing else was combined into ``mask`` ``[batch, 1, queries, keys]`` but ``padding_mask``
    (``[batch, keys]``, true: no padding; or None). If that hides a key, nothing is noted; to know this, the
    host waits, as transformers makes it wait for layers without a window. Other values than a dense mask of
    booleans on a GPU are left alone. Where dynamo traces, nothing is noted if there is a ``padding_mask``.
    """
    if is_dynamo_compiling():
        if padding_mask is None:
            traced_masks.note(mask, window)
        return
    if type(mask) is not torch.Tensor or mask.dtype is not torch.bool or mask.device.type not in _DEVICES:
        return
    # With a cache there are fewer queries than keys. Tensors of inference mode have no version.
    if mask.shape[-2] != mask.shape[-1] or mask.is_inference():
        return
    if padding_mask is None or (not traced() and bool(padding_mask.all())):
        setattr(mask, _ATTRIBUTE, (window, mask._version))


def window_of(mask: torch.Tensor, query: torch.Tensor) -> int | None:
    """Return how many keys a query sees at most under ``mask``, or None if it is not known to be a window.

    ``query`` is ``[batch, heads, queries, head_dim]``; ``mask`` is for as many queries and as many keys.
    """
    if is_dynamo_compiling():
        return traced_masks.keys_seen(mask, query) or None
    if mask.shape[2:] != (query.shape[2], query.shape[2]):
        return None
    window, version = getattr(mask, _ATTRIBUTE, (None, None))
    return window if window is not None and version == mask._version else None

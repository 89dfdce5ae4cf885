"""Attention in a sliding window by torch's flash attention, which skips what the window hides.

``scaled_dot_product_attention`` has no window: with a dense mask it computes all scores. The operator below
it has one. Measured on one H200 (torch 2.11, bfloat16), forward and backward in ms:

                                                            window    dense mask    flex_attention
2 x 4,096 tokens, 16/8 heads of 256, window of 1,024           2.1           9.8               3.7
2 x 4,096 tokens, 32/8 heads of 128, window of 1,024           2.0           6.7               2.0
16,384 tokens, 32/8 heads of 128, window of 4,096             11.6          50.4               9.5
2 x 4,096 tokens, 64/8 heads of 64, window of 128              1.0           7.8               1.4
"""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.kernels.attention.windows import window_of
from veomni_hook.kernels.shared.operand_checks import dtype_of, not_plain, untraceable
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing

__all__ = ["loses", "refuses", "sliding_window"]

#: Shorter calls stay with upstream's code: nothing was measured there.
SHORTEST = 512
_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST, _MULTIPLE = 256, 8
_OPERATOR = torch.ops.aten._flash_attention_forward
_HAS_WINDOW = "window_size_left" in str(_OPERATOR.default._schema)


def sliding_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    module: object,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, None]:
    """Return attention in the window that ``attention_mask`` is known to be; see `masked.sliding_window`."""
    window = window_of(attention_mask, query)
    assert window is not None  # noqa: S101 - `refuses` has asked
    dtype = dtype_of(query)
    q, k, v = (tensor.to(dtype).transpose(1, 2) for tensor in (query, key, value))
    length = query.shape[2]
    output = _OPERATOR(
        q, k, v, None, None, length, length, 0.0, True, False,
        scale=scaling, window_size_left=window - 1, window_size_right=0,
    )[0]  # fmt: skip
    return output, None


def refuses(  # noqa: PLR0911 - the operands of the op, one return a refusal
    owner: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    module: object,
    scaling: object,
    dropout: Any,
) -> str | None:
    """Return why this call must run the upstream code, or None."""
    if (reason := not_plain(query, key, value, attention_mask) or untraceable()) is not None:
        return reason
    if window_of(attention_mask, query) is None:
        return "the mask is not known to be a causal sliding window alone"
    if key.shape[2] != query.shape[2]:
        return "the numbers of queries and keys differ: there is a cache"
    if dropout > 0 and owner.training:
        return f"the attention has dropout ({dropout}), whose random numbers would be others"
    dtypes = [dtype_of(tensor) for tensor in (query, key, value)]
    if dtypes[0] not in _DTYPES or dtypes[1] != dtypes[0] or dtypes[2] != dtypes[0]:
        names = f"{dtypes[0]}, {dtypes[1]} and {dtypes[2]}"
        return f"query, key and value are {names}: flash attention needs half precision"
    width = query.shape[-1]
    if width % _MULTIPLE or width > _WIDEST or key.shape[-1] != width or value.shape[-1] != width:
        return f"heads have {width} and {value.shape[-1]} columns: flash attention needs one multiple of 8"
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return "the columns of a head are not contiguous"
    if not _HAS_WINDOW:
        return "torch's flash attention has no window here"
    if not _is_switched_on():
        return "flash attention is switched off in torch"
    return None


@answered_while_tracing
def _is_switched_on() -> bool:
    # Compiled code keeps the answer, as it does for torch's own `scaled_dot_product_attention`.
    return torch._C._get_flash_sdp_enabled()


def loses(owner: object, query: torch.Tensor, *others: object) -> str | None:
    """Return why ``auto`` leaves this call to the upstream code, or None."""
    if query.shape[2] < SHORTEST:
        return f"fewer than {SHORTEST} queries: not measured to be faster"
    return None

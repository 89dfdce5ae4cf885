"""What transformers calls by the name ``sdpa`` in this mode: attention with the same bits in any batch.

On a GPU, torch's flash attention with boundaries computes all segments of a call. It never divides the keys
of a query among programs, unlike the function for whole batches, and its blocks of keys begin with the
segment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from veomni_hook.accelerator import is_rocm
from veomni_hook.batch_invariance import blocks
from veomni_hook.batch_invariance.segments import Segment, of_mask, without_mask
from veomni_hook.errors import KernelError
from veomni_hook.kernels.shared.host_values import derived

__all__ = ["sdpa"]

Tensor = torch.Tensor

_WIDEST, _MULTIPLE = 256, 8


def sdpa(  # noqa: PLR0913, PLR0917 - the parameters of transformers' function
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention as `transformers.integrations.sdpa_attention.sdpa_attention_forward`, and None.

    ``query`` is ``[batch, heads, queries, head_dim]``, ``key`` and ``value`` have as many heads or fewer. The
    result is ``[batch, queries, heads, width of values]``; queries that see no key get zeros.

    Raises:
        KernelError: the call cannot be batch-invariant; the error says why.
    """
    _check(module, query, key, dropout, options)
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        # torch aligns the first query with the first key: with a cache, there are masks.
        if causal and queries != keys:
            _refuse(module, f"{queries} queries see {keys} keys, and there is no mask")
        segments = without_mask(len(query), queries, keys, causal=causal)
    else:
        segments = derived(attention_mask, _segments, len(query), keys)
        window = options.get("sliding_window")
        # Nobody knows where the blocks of keys begin if some were dropped from a cache.
        if window and queries != keys and any(last - first >= window for _, _, (first, last), *_ in segments):
            _refuse(module, f"its cache holds no more than a window of {window} keys")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = _with_flash if query.is_cuda else _with_blocks
    return attend(module, query, key, value, segments, scale), None


def _segments(mask: Tensor, batch: int, keys: int) -> tuple[Segment, ...]:
    return of_mask(mask[..., :keys].expand(batch, -1, -1, -1))


def _with_blocks(
    module: object, query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float
) -> Tensor:
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    key, value = (operand.repeat_interleave(groups, 1) for operand in (key, value))
    rows: list[list[Tensor]] = [[] for _ in range(batch)]
    done = [0] * batch
    width = value.shape[3]
    for segment in segments:
        row, (first, last), seen = segment.row, segment.queries, slice(*segment.keys)
        rows[row].append(query.new_zeros(heads, first - done[row], width))
        rows[row].append(
            blocks.attend(query[row, :, first:last], key[row, :, seen], value[row, :, seen], segment, scale)
        )
        done[row] = last
    filled = [
        torch.cat([*parts, query.new_zeros(heads, queries - end, width)], 1)
        for parts, end in zip(rows, done, strict=True)
    ]
    return torch.stack(filled).transpose(1, 2).contiguous()


def _with_flash(
    module: object, query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float
) -> Tensor:
    wide = value.shape[3]
    width = -(-max(query.shape[3], wide) // _MULTIPLE) * _MULTIPLE
    if query.dtype not in (torch.bfloat16, torch.float16) or width > _WIDEST:
        _refuse(module, f"flash attention takes no {query.dtype} heads of {width} columns")
    q, k, v = (
        functional.pad(operand.transpose(1, 2), (0, width - operand.shape[3])).flatten(0, 1)
        for operand in (query, key, value)
    )
    batch, _, queries, _ = query.shape
    seeing = sum(last - first for _, (first, last), *_ in segments)
    result = q.new_zeros(*q.shape[:2], width) if seeing < batch * queries else None
    # A call has one kind of segments: nearly always, all have the same.
    for causal, window in dict.fromkeys((segment.causal, segment.window) for segment in segments):
        kind = [segment for segment in segments if (segment.causal, segment.window) == (causal, window)]
        output, at = _flash(q, k, v, kind, queries, key.shape[2], scale)
        if at is None and result is None:
            result = output
        else:
            result = q.new_zeros(*q.shape[:2], width) if result is None else result
            result = result.index_copy(
                0, at if at is not None else torch.arange(len(q), device=q.device), output
            )
    assert result is not None  # noqa: S101 - a call without segments has gaps
    result = result.view(batch, queries, -1, width)
    return result if width == wide else result[..., :wide].contiguous()


def _flash(
    q: Tensor, k: Tensor, v: Tensor, segments: list[Segment], queries: int, keys: int, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of segments of one kind, and where they belong; None: these are all rows, in order."""
    of_queries = [_positions(segment.row, queries, segment.queries) for segment in segments]
    of_keys = [_positions(segment.row, keys, segment.keys) for segment in segments]
    at, seen = _index(of_queries, q), _index(of_keys, k)
    if at is not None:
        q = q.index_select(0, at)
    if seen is not None:
        k, v = k.index_select(0, seen), v.index_select(0, seen)
    lengths = [[last - first for first, last in ranges] for ranges in (of_queries, of_keys)]
    ends = [torch.tensor([0, *of_ranges]).cumsum(0) for of_ranges in lengths]
    bounds = [x.to(q.device, torch.int32, non_blocking=True) for x in ends]
    # With a bound of one query, flash attention would take the heads of a group for queries.
    longest = [max(2, *of_ranges) for of_ranges in lengths]
    window = segments[0].window
    limits = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    output = torch.ops.aten._flash_attention_forward(
        q, k, v, *bounds, *longest, 0.0, segments[0].causal, False, scale=scale, **limits
    )[0]
    return output, at


def _positions(row: int, length: int, part: tuple[int, int]) -> tuple[int, int]:
    return row * length + part[0], row * length + part[1]


def _index(parts: list[tuple[int, int]], x: Tensor) -> Tensor | None:
    """Return the rows of ``x`` that the parts name; None: all of them, in order."""
    ends = [0, *(last for _, last in parts)]
    if [first for first, _ in parts] == ends[:-1] and ends[-1] == len(x):
        return None
    return torch.cat([torch.arange(*part) for part in parts]).to(x.device, non_blocking=True)


def _check(module: Any, query: Tensor, key: Tensor, dropout: float, options: dict[str, object]) -> None:
    if dropout > 0 and module.training:
        _refuse(module, f"there is dropout ({dropout})")
    for name in ("softcap", "s_aux", "position_bias", "cache"):
        if options.get(name) is not None:
            _refuse(module, f"it is called with {name}")
    if torch.compiler.is_compiling():
        _refuse(module, "torch.compile traces it")
    if query.is_cuda and is_rocm():
        _refuse(module, "nothing was checked on ROCm")


def _refuse(module: object, what: str) -> None:
    raise KernelError(
        f"{type(module).__name__} cannot be batch-invariant: {what}",
        where="deterministic=batch_invariant",
        fix="change that, or leave the setting out",
    )

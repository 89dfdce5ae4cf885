"""The samples that share the rows of a batch: where each ends, on the host.

Boundaries are ``[samples + 1]``: 0, then the end of each sample, counted through all rows.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from veomni_hook.errors import SamplesError
from veomni_hook.kernels.shared.host_values import derived, note_copy

__all__ = ["boundaries", "ends_of", "indices_of", "last_of_rows", "of_rows", "unfit_ends"]


def ends_of(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Return the values of boundaries; the host waits only at the first call for a tensor of a device."""
    return derived(cu_seqlens, _values)


def unfit_ends(cu_seqlens: torch.Tensor, positions: int) -> str | None:
    """Return why boundaries do not divide so many positions, or None."""
    ends = ends_of(cu_seqlens) if cu_seqlens.dim() == 1 else ()
    if not ends or ends[0] != 0 or ends[-1] != positions:
        return f"the boundaries do not divide {positions} positions"
    if any(start > end for start, end in pairwise(ends)):
        return "the boundaries are not in order"
    return None


def of_rows(
    rows: int, positions: int, cu_seqlens: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the boundaries of samples that share rows; None: each row is one sample.

    No sample is empty or in two rows.

    Args:
        rows: of the batch.
        positions: of a row.
        cu_seqlens: boundaries, or None.
        seq_idx: ``[rows, positions]``, the number of each position's sample; asked without ``cu_seqlens``.

    Raises:
        SamplesError: the boundaries are not a tensor, or do not divide all positions.
    """
    for name, bounds in (("cu_seq_lens_q", cu_seqlens), ("seq_idx", seq_idx)):
        if bounds is not None and not isinstance(bounds, torch.Tensor):
            raise SamplesError(
                f"the boundaries are a {type(bounds).__name__}", where=name, fix="pass a tensor of integers"
            )
    if cu_seqlens is not None:
        return derived(cu_seqlens, _divided, rows, positions, cu_seqlens.device)
    return None if seq_idx is None else derived(seq_idx, _changes, rows, positions, seq_idx.device)


def indices_of(cu_seqlens: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the number of each position's sample as int32 ``[rows, positions]``."""
    return derived(cu_seqlens, _indices, rows, cu_seqlens.device)


def last_of_rows(cu_seqlens: torch.Tensor, rows: int) -> list[int]:
    """Return the number of each row's last sample."""
    ends = ends_of(cu_seqlens)
    return [ends.index(row * ends[-1] // rows) - 1 for row in range(1, rows + 1)]


def boundaries(ends: list[int], device: torch.device) -> torch.Tensor:
    """Return int32 boundaries on ``device``, whose values the host knows."""
    host = torch.tensor(ends, dtype=torch.int32)
    # From pageable memory, too, the copy is made before this returns.
    return note_copy(host.to(device, non_blocking=True), host)


def _values(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    return tuple(cu_seqlens.tolist())


def _divided(
    cu_seqlens: torch.Tensor, rows: int, positions: int, device: torch.device
) -> torch.Tensor | None:
    if (reason := unfit_ends(cu_seqlens, rows * positions)) is not None:
        raise SamplesError(
            f"{reason}: {cu_seqlens.tolist()}",
            where="cu_seq_lens_q",
            fix="pass the cumulative lengths of all samples, beginning with 0; and none to continue a cache",
        )
    return _joined(cu_seqlens.tolist(), rows, positions, device)


def _changes(seq_idx: torch.Tensor, rows: int, positions: int, device: torch.device) -> torch.Tensor | None:
    if seq_idx.shape != (rows, positions):
        raise SamplesError(
            f"the numbers of samples are {list(seq_idx.shape)}, the batch is {[rows, positions]}",
            where="seq_idx",
            fix="pass a number for each position; and none to continue a cache",
        )
    changed = torch.zeros(rows, positions, dtype=torch.bool)
    changed[:, 1:] = seq_idx.diff(dim=-1) != 0
    return _joined(changed.flatten().nonzero().flatten().tolist(), rows, positions, device)


def _joined(ends: list[int], rows: int, positions: int, device: torch.device) -> torch.Tensor | None:
    ends_of_rows = range(0, rows * positions + 1, max(positions, 1))
    all_ends = sorted({*ends, *ends_of_rows})
    return None if len(all_ends) == len(ends_of_rows) else boundaries(all_ends, device)


def _indices(cu_seqlens: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(cu_seqlens.numel() - 1, dtype=torch.int32)
    return (
        torch.repeat_interleave(numbers, cu_seqlens.diff().long())
        .view(rows, -1)
        .to(device, non_blocking=True)
    )

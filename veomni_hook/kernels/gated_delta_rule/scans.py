"""Launches of the scan over chunks of the gated delta rule in Triton, and what it takes and returns.

Both forms of the rule, with one decay per head or per channel, run the same scan.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, NamedTuple

import torch

from veomni_hook.kernels.gated_delta_rule import scan_device
from veomni_hook.kernels.gated_delta_rule.chunks import LENGTH
from veomni_hook.kernels.gated_delta_rule.tables import Tables
from veomni_hook.kernels.shared.launch import Launch, generation, power, room

__all__ = ["Parts", "Scanned", "Scans", "squares_of", "state_of"]

Tensor = torch.Tensor
#: Rows of the transposed state for one program: those that one warp group multiplies at once.
_ROWS = 64
#: On an H200, 16,384 positions, 16 key heads and 32 heads of 128, bfloat16, in ms: with two stages 0.57
#: forward and 0.57 backward, with three 0.36 and 0.50.
_WARPS, _STAGES = 4, 3
#: Bytes of shared memory for three stages of heads of 128; two fit everywhere.
_ROOMY = 200 << 10
#: The columns that a product has at least. On Hopper, for products of 16 or 32, ptxas 12.8 (Triton 3.6) makes
#: code that reads a register which nothing has written, and launches of such kernels ended with an illegal
#: memory access. Triton's issue 11366 reports one with 3.7.1, for 32 columns.
_FEWEST, _FEWEST_ON_HOPPER, _HOPPER = 16, 64, 9


class Parts(NamedTuple):
    """What a scan needs of every chunk; see `local_device.local`, and `channel_device.local`."""

    q: Tensor
    k: Tensor
    total: Tensor
    solved: Tensor
    w: Tensor
    u: Tensor
    p: Tensor


class Scanned(NamedTuple):
    """States and what is written, for every chunk, and the gradients of both; see `scan_device`."""

    states: Tensor
    written: Tensor
    dstates: Tensor
    dwritten: Tensor


class Scans:
    """The launches of the scan for heads of one size.

    Attributes:
        channels: whether each channel has a decay.
        keys: the channels of keys in a chunk's parts, a power of two.
        values: those of values.
        roomy: whether the device has shared memory for three stages of heads of 128.
        precision: how float32 is multiplied, in the interpreter alone.
    """

    channels: ClassVar[bool]

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self.heads, self.groups, keys, values = sizes
        least = _FEWEST_ON_HOPPER if generation(device) == _HOPPER else _FEWEST
        self.keys, self.values = max(least, power(keys)), max(least, power(values))
        self.widths = (*sizes, self.keys, self.values)
        self.scale = keys**-0.5
        self.roomy = room(device)[1] >= _ROOMY
        self.precision = "ieee" if dtype == torch.float32 else "tf32"
        self._rows = min(_ROWS, self.values)
        self._launches: dict[tuple[Hashable, tuple[bool, ...]], Launch] = {}

    def parts_of_state(self, rows: int, stages: int) -> tuple[int, int]:
        """Return how many rows of a state a kernel loads at once, and how many such parts ahead."""
        if self.keys > 128:
            rows, stages = 32 if self.roomy else 16, 1
        return min(rows, self.values), stages if self.roomy else min(2, stages)

    def outputs(
        self,
        parts: Parts,
        tables: Tables,
        v: Tensor,
        initial: Tensor | None,
        final: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the final states if ``final``."""
        samples = tables.bounds.numel() - 1
        output = v.new_empty(v.shape)
        last = state_of(v, self.widths[2], samples if final else 0)
        start = last if initial is None else initial.to(torch.float32).contiguous()
        if samples:
            self._launch(scan_device.forward, 13, (initial is not None, final, False))(
                (self.values // self._rows, self.heads, samples),
                parts.q, parts.k, parts.total, parts.w, parts.u, parts.p, tables.bounds, tables.first,
                start, output, last, output, output,
            )  # fmt: skip
        return output, last

    def scanned(
        self,
        parts: Parts,
        tables: Tables,
        dy: Tensor,
        initial: Tensor | None,
        dfinal: Tensor | None,
        to_initial: bool,
    ) -> tuple[Scanned, Tensor]:
        """Return what the gradients within chunks need, and that of the initial states if ``to_initial``."""
        samples = tables.bounds.numel() - 1
        chunks = tables.starts.numel()
        states, dstates = (parts.q.new_empty(chunks, self.heads, self.values, self.keys) for _ in range(2))
        written, dwritten = (torch.empty_like(parts.u) for _ in range(2))
        dinitial = state_of(dy, self.widths[2], samples if to_initial else 0)
        start = dinitial if initial is None else initial.to(torch.float32).contiguous()
        end = dinitial if dfinal is None else dfinal.to(torch.float32).contiguous()
        if samples:
            self._launch(scan_device.both, 16, (initial is not None, dfinal is not None, to_initial))(
                (self.values // self._rows, 2 * self.heads, samples),
                parts.q, parts.k, parts.total, parts.w, parts.u, parts.p, dy, tables.bounds, tables.first,
                start, end, dinitial, states, written, dstates, dwritten,
            )  # fmt: skip
        return Scanned(states, written, dstates, dwritten), dinitial

    def _launch(self, function: Hashable, tensors: int, flags: tuple[bool, ...]) -> Launch:
        if (function, flags) not in self._launches:
            stages = 1 if max(self.keys, self.values) > 128 else _STAGES if self.roomy else 2
            self._launches[function, flags] = Launch(
                function,
                tensors,
                *self.widths,
                self._rows,
                self.scale,
                *flags,
                self.channels,
                self.precision,
                num_warps=_WARPS,
                num_stages=stages,
            )
        return self._launches[function, flags]


def squares_of(q: Tensor, v: Tensor, chunks: int, *, channels: bool) -> Tensor:
    """Return room for what is saved of every chunk, ``[.., chunks, heads, 64, 64]``: its inverse, and P.

    P is saved with a decay for each channel, where it is most of a chunk's work.
    """
    return q.new_empty(2 if channels else 1, chunks, v.shape[2], LENGTH, LENGTH)


def state_of(v: Tensor, keys: int, samples: int) -> Tensor:
    """Return room for states ``[samples, heads, keys, values]`` of ``[rows, positions, heads, values]``."""
    return v.new_empty(samples, v.shape[2], keys, v.shape[3], dtype=torch.float32)

"""The gated delta rule chunk by chunk in Triton: forward and backward, for all samples at once.

`local_device` computes what needs one chunk, `scan_device` passes the state from chunk to chunk, and
`gradients_device` takes what the two scans left to the gradients. With a decay for each channel,
`channel_device` and `channel_gradients_device` do so beside the same scan. The order of all sums is fixed.

Shapes: query and key ``[rows, positions, key heads, K]``, value ``[rows, positions, heads, V]``, in bfloat16
or float16, one dtype, K and V at most 256; g and beta ``[rows, positions, heads]``; with a decay for each
channel there are as many key heads as heads, and g is ``[rows, positions, heads, K]``. Sums and exponents are
float32; the state, and factors with their decays, are rounded for products. Saved: the operands, and a
chunk's inverse, 64 elements for each position and head; with a decay for each channel, also P, as many.
Mutates: nothing. Deterministic.
"""

from __future__ import annotations

import torch

from veomni_hook.kernels.gated_delta_rule import (
    channel_device,
    channel_gradients_device,
    gradients_device,
    local_device,
)
from veomni_hook.kernels.gated_delta_rule import torch as in_torch
from veomni_hook.kernels.gated_delta_rule.rule import Launches, Operands, rule, unfit
from veomni_hook.kernels.gated_delta_rule.scans import Parts, Scanned
from veomni_hook.kernels.shared.launch import TRITON, Launch, generation

__all__ = ["channel_decay", "refuses", "scalar_decay"]

Tensor = torch.Tensor
#: Warps and stages of each kernel. 16,384 positions, 16 key heads and 32 heads of 128, bfloat16, in ms: on an
#: H100 ``states`` in 8 warps 0.59, in 4 1.1, ``system`` in 4 warps 0.91, in 8 1.1; on an H200 ``local`` in 4
#: warps 0.48, in 8 or 2 0.73.
_OPTIONS: dict[str, dict[str, int]] = {
    "local": {"num_warps": 4},
    "states": {"num_warps": 8, "num_stages": 1},
    "system": {"num_warps": 4, "num_stages": 1},
}
#: Rows of the state for a part of the gradients' kernels, and how many parts are loaded ahead: registers do
#: not hold a whole state beside the sums. ``system`` with one part ahead takes 1.14.
_PARTS = {"states": (64, 3), "system": (64, 2)}
#: The same with a decay for each channel. 16,384 positions, 32 heads of 128, bfloat16, on an H200, in ms:
#: ``local`` (both launches of a step) in 4 warps 2.1, in 8 3.0, in 8 with parts of 128 channels 2.5;
#: ``states`` in 4 warps with two parts ahead 0.47, in 8 with three 0.67; ``system`` 0.51 and 0.73;
#: ``products`` in 8 or 4 warps 3.8 with parts of 32 channels, 3.9 with parts of 64 in 8 and 8.2 in 4.
_CHANNEL_OPTIONS: dict[str, dict[str, int]] = {
    "local": {"num_warps": 4, "num_stages": 1},
    "states": {"num_warps": 4, "num_stages": 1},
    "system": {"num_warps": 4, "num_stages": 1},
    "products": {"num_warps": 8, "num_stages": 1},
}
_CHANNEL_PARTS = {"states": (64, 2), "system": (64, 2)}
#: Channels for a part of a kernel that has a chunk's decays in registers.
_CHANNELS = {"local": 32, "products": 32}
_BLACKWELL = 10


def _loads_late(device: torch.device) -> bool:
    """Whether kernels must not load ahead: Triton 3.4 and 3.5 then end with errors for Blackwell."""
    return generation(device) == _BLACKWELL and TRITON < (3, 6)


class _ScalarLaunches(Launches):
    """With one decay for all channels of a head."""

    channels = False

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], normalise: bool
    ) -> None:
        super().__init__(device, dtype, sizes, normalise)
        strides, late = sizes[4:], _loads_late(device)
        self.solve, self.local = (
            Launch(
                local_device.local,
                14,
                *self.widths,
                *strides,
                self.scale,
                normalise,
                solve,
                self.precision,
                **_OPTIONS["local"] | ({"num_stages": 1} if late else {}),
            )
            for solve in (True, False)
        )
        norms = (normalise, self.precision)
        self.through_states = Launch(
            gradients_device.through_states,
            13,
            *self.widths,
            *strides[:2],
            self.scale,
            *norms,
            *self.parts_of_state(*_PARTS["states"]),
            **_OPTIONS["states"],
        )
        self.through_system = Launch(
            gradients_device.through_system,
            18,
            *self.widths,
            *strides[2:],
            *norms,
            *self.parts_of_state(*((256, 1) if late else _PARTS["system"])),
            **_OPTIONS["system"],
        )

    def _gradients(
        self,
        grid: tuple[int, int, int],
        operands: Operands,
        places: tuple[Tensor, Tensor],
        parts: Parts,
        scanned: Scanned,
        dy: Tensor,
        results: tuple[Tensor, ...],
    ) -> None:
        query, key, value, _, write = operands
        dk = torch.empty_like(parts.k, dtype=torch.float32)
        dtotal = torch.empty_like(parts.total)
        self.through_states(
            grid, query, *places, parts.q, parts.k, parts.total, *scanned[:3], dy, results[0], dk, dtotal,
        )  # fmt: skip
        self.through_system(
            grid, key, value, write, *places, parts.k, parts.total, parts.solved, parts.w, parts.u,
            scanned.states, scanned.dwritten, dk, dtotal, *results[1:],
        )  # fmt: skip


class _ChannelLaunches(Launches):
    """With a decay for each channel."""

    channels = True

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], normalise: bool
    ) -> None:
        super().__init__(device, dtype, sizes, normalise)
        (heads, _, keys, values), strides = sizes[:4], sizes[4:]
        channels = {name: min(self.keys, part) for name, part in _CHANNELS.items()}
        norms = (self.scale, normalise)
        self.solve, self.local = (
            Launch(
                channel_device.local,
                14,
                *(heads, keys, values, self.keys, self.values),
                *strides,
                *norms,
                solve,
                self.precision,
                channels["local"],
                **_CHANNEL_OPTIONS["local"],
            )
            for solve in (True, False)
        )
        of_states = (heads, values, self.keys, self.values)
        self.through_states = Launch(
            channel_gradients_device.through_states,
            10,
            *of_states,
            self.precision,
            *self.parts_of_state(*_CHANNEL_PARTS["states"]),
            **_CHANNEL_OPTIONS["states"],
        )
        self.through_system = Launch(
            channel_gradients_device.through_system,
            13,
            *of_states,
            *strides[4:6],
            self.precision,
            *self.parts_of_state(*_CHANNEL_PARTS["system"]),
            **_CHANNEL_OPTIONS["system"],
        )
        self.through_products = Launch(
            channel_gradients_device.through_products,
            17,
            *(heads, keys, self.keys),
            *strides[:4],
            *strides[6:],
            *norms,
            self.precision,
            channels["products"],
            **_CHANNEL_OPTIONS["products"],
        )

    def _gradients(
        self,
        grid: tuple[int, int, int],
        operands: Operands,
        places: tuple[Tensor, Tensor],
        parts: Parts,
        scanned: Scanned,
        dy: Tensor,
        results: tuple[Tensor, ...],
    ) -> None:
        query, key, value, g, write = operands
        dp, da = (torch.empty_like(parts.p) for _ in range(2))
        dq, dk = (torch.empty_like(parts.k, dtype=torch.float32) for _ in range(2))
        dtotal, dread = torch.empty_like(parts.total), torch.empty_like(parts.w)
        dwrite = parts.total.new_empty(parts.p.shape[:3])
        self.through_states(grid, *places, *scanned[:3], dy, dp, dq, dk, dtotal)
        self.through_system(
            grid, value, write, *places, parts.solved, parts.w, parts.u, scanned.states, scanned.dwritten,
            da, dread, results[2], dwrite,
        )  # fmt: skip
        self.through_products(
            grid, query, key, g, write, *places, dp, dq, dk, dtotal, da, dread, dwrite,
            results[0], results[1], results[3], results[4],
        )  # fmt: skip


#: Return what `reference` says of the variant of this name.
scalar_decay = rule("gated_delta_rule", _ScalarLaunches, in_torch.scalar_decay)
channel_decay = rule("channel_delta_rule", _ChannelLaunches, in_torch.channel_decay)


def refuses(owner: object, query: Tensor, key: Tensor, value: Tensor, *others: object) -> str | None:
    """Return what the kernels refuse, beside `operand_checks`, or None."""
    reason = unfit(owner, query, key, value)
    if reason is None and query.shape[-1] > 128 and _loads_late(query.device):
        reason = "heads are wider than 128, whose gradients Triton before 3.6 does not compile for Blackwell"
    return reason

"""The gated delta rule with a decay for each channel in Triton: forward and backward, all samples at once.

`channel_device` computes what needs one chunk, `scan_device` passes the state from chunk to chunk as for a
decay a head, and `channel_gradients_device` takes what the two scans left to the gradients. The order of all
sums is fixed.

Shapes: query and key ``[rows, positions, heads, K]``, value ``[rows, positions, heads, V]``, in bfloat16 or
float16, one dtype, K and V at most 256; g ``[rows, positions, heads, K]``, beta ``[rows, positions, heads]``.
Sums and exponents are float32; the state, and factors with their decays, are rounded for products. Saved: the
operands, and a chunk's inverse, 64 elements for each position and head. Mutates: nothing. Deterministic.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from veomni_hook.kernels.gated_delta_rule import channel_device, channel_gradients_device
from veomni_hook.kernels.gated_delta_rule.channels import channel_decay as in_torch
from veomni_hook.kernels.gated_delta_rule.rule import (
    Launches,
    Operands,
    by_token,
    rule,
)
from veomni_hook.kernels.gated_delta_rule.scans import Parts, Scanned, Scans
from veomni_hook.kernels.gated_delta_rule.tables import Tables
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch

__all__ = ["channel_decay"]

Tensor = torch.Tensor
#: Warps and stages of each kernel. 16,384 positions, 32 heads of 128, bfloat16, on an H200, in ms: ``local``
#: (both launches of a step) in 4 warps 3.8, in 8 4.3; ``states`` in 4 warps with two parts ahead 0.47, in 8
#: with three 0.67; ``system`` 0.51 and 0.73; ``products`` in 8 warps 4.6 with parts of 32 channels, 4.8 with
#: parts of 64, and 4.8 in 4 warps.
_OPTIONS: dict[str, dict[str, int]] = {
    "local": {"num_warps": 4, "num_stages": 1},
    "states": {"num_warps": 4, "num_stages": 1},
    "system": {"num_warps": 4, "num_stages": 1},
    "products": {"num_warps": 8, "num_stages": 1},
}
#: Rows of the state for a part of the gradients' kernels, and how many parts are loaded ahead.
_PARTS = {"states": (64, 2), "system": (64, 2)}
#: Channels for a part of a kernel that has a chunk's decays in registers; ``local`` is as fast with 64, which
#: spills.
_CHANNELS = {"local": 32, "products": 32}


@lru_cache(maxsize=LAUNCHES)
def _launches(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, ...],
    normalise: bool,
) -> _Launches:
    return _Launches(device, dtypes[0], sizes, normalise)


class _Launches(Launches):
    """The launches for one kind of operands: heads, 1, widths, strides."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        normalise: bool,
    ) -> None:
        (heads, _, keys, values), strides = sizes[:4], sizes[4:]
        self.scans = scans = Scans(sizes[:4], dtype, device, channels=True)
        channels = {name: min(scans.keys, part) for name, part in _CHANNELS.items()}
        norms = (scans.scale, normalise)
        self.solve, self.local = (
            Launch(
                channel_device.local,
                14,
                *(heads, keys, values, scans.keys, scans.values),
                *strides,
                *norms,
                solve,
                scans.precision,
                channels["local"],
                **_OPTIONS["local"],
            )
            for solve in (True, False)
        )
        of_states = (heads, values, scans.keys, scans.values)
        self.through_states = Launch(
            channel_gradients_device.through_states,
            10,
            *of_states,
            scans.precision,
            *scans.parts_of_state(*_PARTS["states"]),
            **_OPTIONS["states"],
        )
        self.through_system = Launch(
            channel_gradients_device.through_system,
            13,
            *of_states,
            *strides[4:6],
            scans.precision,
            *scans.parts_of_state(*_PARTS["system"]),
            **_OPTIONS["system"],
        )
        self.through_products = Launch(
            channel_gradients_device.through_products,
            17,
            *(heads, keys, scans.keys),
            *strides[:4],
            *strides[6:],
            *norms,
            scans.precision,
            channels["products"],
            **_OPTIONS["products"],
        )

    def within_chunks(
        self, operands: Operands, tables: Tables, parts: Parts, scanned: Scanned, dy: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the operands."""
        query, key, value, g, write = operands
        results = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in operands)
        if not (chunks := tables.starts.numel()):
            return results
        grid, places = (chunks, query.shape[2], 1), (tables.starts, tables.ends)
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
        return results


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    normalise: bool,
) -> tuple[Operands, _Launches]:
    q, k, v, g, beta = by_token(q), by_token(k), by_token(v), by_token(g), beta.contiguous()
    strides = [each.stride(dim) for each in (q, k, v, g) for dim in (1, 2)]
    sizes = (v.shape[2], 1, q.shape[3], v.shape[3], *strides)
    return (q, k, v, g, beta), _launches(q.device, (q.dtype, g.dtype, beta.dtype), sizes, normalise)


_rule = rule("channel_delta_rule", _prepared, in_torch)


def channel_decay(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what `reference.channel_decay` says."""
    options = (bool(use_qk_l2norm_in_kernel), bool(output_final_state))
    output, final = _rule(query, key, value, g, beta, initial_state, cu_seqlens, *options)
    return output, final if output_final_state else None

"""The gated delta rule chunk by chunk in Triton: forward and backward, for all samples at once.

`local_device` computes what needs one chunk, `scan_device` passes the state from chunk to chunk, and
`gradients_device` takes what the two scans left to the gradients. The order of all sums is fixed.

Shapes: query and key ``[rows, positions, key heads, K]``, value ``[rows, positions, heads, V]``, in bfloat16
or float16, one dtype, K and V at most 256; g and beta ``[rows, positions, heads]``. Sums are float32, the
state is rounded for products. Saved: the operands, and a chunk's inverse, 64 elements for each position and
head. Mutates: nothing. Deterministic.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from veomni_hook.kernels.gated_delta_rule import gradients_device, local_device
from veomni_hook.kernels.gated_delta_rule.rule import (
    Launches,
    Operands,
    by_token,
    rule,
    unfit,
)
from veomni_hook.kernels.gated_delta_rule.scans import Parts, Scanned, Scans
from veomni_hook.kernels.gated_delta_rule.tables import Tables
from veomni_hook.kernels.gated_delta_rule.torch import scalar_decay as in_torch
from veomni_hook.kernels.shared.launch import LAUNCHES, TRITON, Launch, generation

__all__ = ["refuses", "scalar_decay"]

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
_BLACKWELL = 10


def _loads_late(device: torch.device) -> bool:
    """Whether kernels must not load ahead: Triton 3.4 and 3.5 then end with errors for Blackwell."""
    return generation(device) == _BLACKWELL and TRITON < (3, 6)


@lru_cache(maxsize=LAUNCHES)
def _launches(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, ...],
    normalise: bool,
) -> _Launches:
    return _Launches(device, dtypes[0], sizes, normalise)


class _Launches(Launches):
    """The launches for one kind of operands: heads, heads a key head, widths, strides."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        normalise: bool,
    ) -> None:
        strides, late = sizes[4:], _loads_late(device)
        self.scans = scans = Scans(sizes[:4], dtype, device, channels=False)
        self.solve, self.local = (
            Launch(
                local_device.local,
                14,
                *scans.widths,
                *strides,
                scans.scale,
                normalise,
                solve,
                scans.precision,
                **_OPTIONS["local"] | ({"num_stages": 1} if late else {}),
            )
            for solve in (True, False)
        )
        norms = (normalise, scans.precision)
        self.through_states = Launch(
            gradients_device.through_states,
            13,
            *scans.widths,
            *strides[:2],
            scans.scale,
            *norms,
            *scans.parts_of_state(*_PARTS["states"]),
            **_OPTIONS["states"],
        )
        self.through_system = Launch(
            gradients_device.through_system,
            18,
            *scans.widths,
            *strides[2:],
            *norms,
            *scans.parts_of_state(*((256, 1) if late else _PARTS["system"])),
            **_OPTIONS["system"],
        )

    def within_chunks(
        self, operands: Operands, tables: Tables, parts: Parts, scanned: Scanned, dy: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the operands."""
        results = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in operands)
        if not (chunks := tables.starts.numel()):
            return results
        query, key, value, _, write = operands
        grid, places = (chunks, query.shape[2], 1), (tables.starts, tables.ends)
        dk = torch.empty_like(parts.k, dtype=torch.float32)
        dtotal = torch.empty_like(parts.total)
        self.through_states(
            grid, query, *places, parts.q, parts.k, parts.total, *scanned[:3], dy, results[0], dk, dtotal,
        )  # fmt: skip
        self.through_system(
            grid, key, value, write, *places, parts.k, parts.total, parts.solved, parts.w, parts.u,
            scanned.states, scanned.dwritten, dk, dtotal, *results[1:],
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
    q, k, v, g, beta = by_token(q), by_token(k), by_token(v), g.contiguous(), beta.contiguous()
    heads, groups = v.shape[2], v.shape[2] // q.shape[2]
    strides = [each.stride(dim) for each in (q, k, v) for dim in (1, 2)]
    sizes = (heads, groups, q.shape[3], v.shape[3], *strides)
    return (q, k, v, g, beta), _launches(q.device, (q.dtype, g.dtype, beta.dtype), sizes, normalise)


_rule = rule("gated_delta_rule", _prepared, in_torch)


def scalar_decay(
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
    """Return what `reference.scalar_decay` says."""
    options = (bool(use_qk_l2norm_in_kernel), bool(output_final_state))
    output, final = _rule(query, key, value, g, beta, initial_state, cu_seqlens, *options)
    return output, final if output_final_state else None


def refuses(owner: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> str | None:
    """Return what the kernels refuse, beside `operand_checks`, or None."""
    reason = unfit(owner, query, key, value)
    if reason is None and query.shape[-1] > 128 and _loads_late(query.device):
        reason = "heads are wider than 128, whose gradients Triton before 3.6 does not compile for Blackwell"
    return reason

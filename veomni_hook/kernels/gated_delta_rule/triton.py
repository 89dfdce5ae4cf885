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

from veomni_hook.kernels.gated_delta_rule import gradients_device, local_device, operand_checks, scan_device
from veomni_hook.kernels.gated_delta_rule.chunks import LENGTH
from veomni_hook.kernels.gated_delta_rule.tables import tables_of
from veomni_hook.kernels.shared.autograd import applied, backward_once
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, power, room
from veomni_hook.kernels.shared.operators import define_op

__all__ = ["refuses", "scalar_decay"]

Tensor = torch.Tensor
_Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_DTYPES = frozenset((torch.bfloat16, torch.float16))
_MOST = 256
#: Rows of the transposed state for one program: those that one warp group multiplies at once.
_ROWS = 64
#: Warps and stages of each kernel. On an H200, 16,384 positions, 16 key heads and 32 heads of 128, bfloat16,
#: in ms: two stages of the scans 0.57 and 0.57, three 0.36 and 0.50; ``local`` in 4 warps 0.48, in 8 or 2
#: 0.73; ``states`` in 8 warps 0.71, in 4 2.2; ``system`` in 4 warps 0.95, in 8 1.1 to 1.3.
_OPTIONS: dict[str, dict[str, int]] = {
    "local": {"num_warps": 4},
    "forward": {"num_warps": 4, "num_stages": 3},
    "backward": {"num_warps": 4, "num_stages": 3},
    "states": {"num_warps": 8, "num_stages": 1},
    "system": {"num_warps": 4, "num_stages": 1},
}
#: Rows of the state for a part of the gradients' kernels, and how many parts are loaded ahead: registers do
#: not hold a whole state beside the sums, and what they spill cost a third of the time.
_PARTS = {"states": (64, 3), "system": (64, 2)}
#: Bytes of shared memory for three stages of heads of 128; two fit everywhere.
_ROOMY = 200 << 10


@lru_cache(maxsize=LAUNCHES)
def _launches(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, ...],
    normalise: bool,  # noqa: FBT001
) -> _Launches:
    return _Launches(dtypes[0], sizes, normalise, room(device)[1] >= _ROOMY)


class _Launches:
    """The launches for one kind of operands: heads, heads a key head, widths, strides."""

    def __init__(
        self,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        normalise: bool,  # noqa: FBT001
        roomy: bool,  # noqa: FBT001
    ) -> None:
        heads, groups, keys, values, *strides = sizes
        self.keys, self.values = max(16, power(keys)), max(16, power(values))
        self.rows = min(_ROWS, self.values)
        precision = "ieee" if dtype == torch.float32 else "tf32"
        scale = keys**-0.5
        self._precision, self._roomy = precision, roomy
        widths = (heads, groups, keys, values, self.keys, self.values)
        self.solve, self.local = (
            Launch(
                local_device.local,
                14,
                *widths,
                *strides,
                scale,
                normalise,
                solve,
                precision,
                **_OPTIONS["local"],
            )
            for solve in (True, False)
        )
        self._scan = (*widths, self.rows, scale)
        norms = (normalise, precision)
        self.through_states = Launch(
            gradients_device.through_states,
            13,
            *widths,
            *strides[:2],
            scale,
            *norms,
            *self._parts("states"),
            **_OPTIONS["states"],
        )
        self.through_system = Launch(
            gradients_device.through_system,
            18,
            *widths,
            *strides[2:],
            *norms,
            *self._parts("system"),
            **_OPTIONS["system"],
        )
        self._forward: dict[tuple[bool, ...], Launch] = {}
        self._backward: dict[tuple[bool, ...], Launch] = {}

    def _parts(self, name: str) -> tuple[int, int]:
        part, stages = _PARTS[name] if self.keys <= 128 else (32, 1)
        return min(part, self.values), stages if self._roomy else min(2, stages)

    def _of_scan(self, name: str) -> dict[str, int]:
        if max(self.keys, self.values) > 128:
            return _OPTIONS[name] | {"num_stages": 1}
        return _OPTIONS[name] if self._roomy else _OPTIONS[name] | {"num_stages": 2}

    def forward(self, *flags: bool) -> Launch:
        """The scan; flags: INITIAL, OUTPUT, FINAL, KEEP."""
        if flags not in self._forward:
            self._forward[flags] = Launch(
                scan_device.forward, 13, *self._scan, *flags, self._precision, **self._of_scan("forward")
            )
        return self._forward[flags]

    def backward(self, *flags: bool) -> Launch:
        """The reverse scan; flags: INITIAL, FINAL."""
        if flags not in self._backward:
            self._backward[flags] = Launch(
                scan_device.backward, 12, *self._scan, *flags, self._precision, **self._of_scan("backward")
            )
        return self._backward[flags]


def _kind(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalise: bool) -> _Launches:  # noqa: FBT001
    heads, groups = v.shape[2], v.shape[2] // q.shape[2]
    strides = [each.stride(dim) for each in (q, k, v) for dim in (1, 2)]
    sizes = (heads, groups, q.shape[3], v.shape[3], *strides)
    return _launches(q.device, (q.dtype, g.dtype, beta.dtype), sizes, normalise)


def _by_token(x: Tensor) -> Tensor:
    """x, or a copy if its elements are not next to each other, or its tokens have no one stride."""
    fits = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if fits else x.contiguous()


class _Parts:
    """What a chunk needs, for all chunks: results of `local_device.local`."""

    def __init__(self, launches: _Launches, operands: _Operands, tables: Any, solved: Tensor | None) -> None:
        q, _, v, _, _ = operands
        heads, key_heads, chunks = v.shape[2], q.shape[2], tables.starts.numel()
        self.q, self.k = (q.new_empty(chunks, key_heads, LENGTH, launches.keys) for _ in range(2))
        self.total = q.new_empty(chunks, heads, LENGTH, dtype=torch.float32)
        self.w = q.new_empty(chunks, heads, LENGTH, launches.keys)
        self.u = q.new_empty(chunks, heads, launches.values, LENGTH)
        self.p = q.new_empty(chunks, heads, LENGTH, LENGTH)
        self.solved = torch.empty_like(self.p) if solved is None else solved
        results = (self.q, self.k, self.total, self.solved, self.w, self.u, self.p)
        if chunks:
            run = launches.solve if solved is None else launches.local
            run((chunks, key_heads, 1), *operands, tables.starts, tables.ends, *results)


def _forward_op(  # noqa: PLR0913, PLR0917
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    normalise: bool,  # noqa: FBT001
    final: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    operands = (_by_token(q), _by_token(k), _by_token(v), g.contiguous(), beta.contiguous())
    launches, tables = _kind(*operands, normalise), tables_of(v, cu_seqlens)
    parts = _Parts(launches, operands, tables, None)
    heads, samples = v.shape[2], tables.bounds.numel() - 1
    output = v.new_empty(v.shape)
    last = _state(v, q.shape[3], samples if final else 0)
    start = last if initial is None else initial.to(torch.float32).contiguous()
    if samples:
        launches.forward(initial is not None, True, final, False)(
            (launches.values // launches.rows, heads, samples),
            parts.q, parts.k, parts.total, parts.w, parts.u, parts.p, tables.bounds, tables.first,
            start, output, last, output, output,
        )  # fmt: skip
    return output, last, parts.solved


def _backward_op(  # noqa: PLR0913, PLR0917
    dy: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    solved: Tensor,
    normalise: bool,  # noqa: FBT001
    to_initial: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = (_by_token(q), _by_token(k), _by_token(v), g.contiguous(), beta.contiguous())
    launches, tables = _kind(*operands, normalise), tables_of(v, cu_seqlens)
    parts = _Parts(launches, operands, tables, solved)
    dy = dy.contiguous()
    heads, key_heads = v.shape[2], q.shape[2]
    chunks, samples = tables.starts.numel(), tables.bounds.numel() - 1
    states, dstates = (q.new_empty(chunks, heads, launches.values, launches.keys) for _ in range(2))
    written, dwritten = (torch.empty_like(parts.u) for _ in range(2))
    dinitial = _state(v, q.shape[3], samples if to_initial else 0)
    start = dinitial if initial is None else initial.to(torch.float32).contiguous()
    end = dinitial if dfinal is None else dfinal.to(torch.float32).contiguous()
    found = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in operands)
    if samples:
        grid = (launches.values // launches.rows, heads, samples)
        launches.forward(initial is not None, False, False, True)(
            grid, parts.q, parts.k, parts.total, parts.w, parts.u, parts.p, tables.bounds, tables.first,
            start, dy, dinitial, states, written,
        )  # fmt: skip
        launches.backward(to_initial, dfinal is not None)(
            grid, parts.q, parts.k, parts.total, parts.w, parts.p, dy, tables.bounds, tables.first,
            end, dinitial, dstates, dwritten,
        )  # fmt: skip
    if chunks:
        query, key, value, _, write = operands
        grid = (chunks, key_heads, 1)
        places = (tables.starts, tables.ends)
        dk = torch.empty_like(parts.k, dtype=torch.float32)
        dtotal = torch.empty_like(parts.total)
        launches.through_states(
            grid,
            query,
            *places,
            parts.q,
            parts.k,
            parts.total,
            states,
            written,
            dstates,
            dy,
            found[0],
            dk,
            dtotal,
        )
        launches.through_system(
            grid, key, value, write, *places, parts.k, parts.total, solved, parts.w, parts.u, states,
            dwritten, dk, dtotal, *found[1:],
        )  # fmt: skip
    return (*found, dinitial)  # type: ignore[return-value]


def _state(v: Tensor, keys: int, samples: int) -> Tensor:
    return v.new_empty(samples, v.shape[2], keys, v.shape[3], dtype=torch.float32)


def _forward_fake(  # noqa: PLR0913, PLR0917
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    normalise: bool,  # noqa: FBT001
    final: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    # Traced code has no boundaries: `refuses` leaves such calls to upstream.
    rows, positions, heads, _ = v.shape
    samples = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
    solved = q.new_empty(rows * -(-positions // LENGTH), heads, LENGTH, LENGTH)
    return v.new_empty(v.shape), _state(v, q.shape[3], samples if final else 0), solved


def _backward_fake(  # noqa: PLR0913, PLR0917
    dy: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    solved: Tensor,
    normalise: bool,  # noqa: FBT001
    to_initial: bool,  # noqa: FBT001
) -> tuple[Tensor, ...]:
    samples = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dinitial = _state(v, q.shape[3], samples if to_initial else 0)
    return (*(each.new_empty(each.shape) for each in (q, k, v, g, beta)), dinitial)


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, Tensor? cu_seqlens"
_FORWARD = define_op(
    f"gated_delta_rule({_OPERANDS}, bool normalise, bool final) -> (Tensor, Tensor, Tensor)",
    _forward_op,
    _forward_fake,
)
_BACKWARD = define_op(
    f"gated_delta_rule_backward(Tensor dy, Tensor? dfinal, {_OPERANDS}, Tensor solved, bool normalise,"
    " bool to_initial) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, cu_seqlens, normalise, final = arguments
        output, last, solved = _FORWARD(*arguments)
        ctx.save_for_backward(*tensors, solved)
        # Not saved as a tensor: what the host knows of it belongs to this object.
        ctx.cu_seqlens, ctx.normalise, ctx.final = cu_seqlens, normalise, final
        ctx.set_materialize_grads(False)
        return output, last

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        *tensors, initial, solved = ctx.saved_tensors
        dy = torch.zeros_like(tensors[2]) if dy is None else dy
        dfinal = dfinal if ctx.final else None
        wanted = ctx.needs_input_grad
        found = _BACKWARD(dy, dfinal, *tensors, initial, ctx.cu_seqlens, solved, ctx.normalise, wanted[5])
        if initial is not None and wanted[5]:
            found = (*found[:5], found[5].to(initial.dtype))
        return (
            *(each if need else None for each, need in zip(found, wanted, strict=False)),
            None,
            None,
            None,
        )


_apply = applied(_Rule)


def scalar_decay(  # noqa: PLR0913, PLR0917 - the operands
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,  # noqa: FBT001, FBT002 - operands are positional
    use_qk_l2norm_in_kernel: bool = False,  # noqa: FBT001, FBT002
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what `reference.scalar_decay` says."""
    options = (bool(use_qk_l2norm_in_kernel), bool(output_final_state))
    output, final = _apply(query, key, value, g, beta, initial_state, cu_seqlens, *options)
    return output, final if output_final_state else None


def refuses(
    owner: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *others: Any
) -> str | None:
    """Return why this call must run the upstream code, or None. Operands: see `reference.scalar_decay`."""
    reason = operand_checks.refuses(owner, query, key, value, g, beta, *others)
    if reason is not None:
        return reason
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    if max(query.shape[3], value.shape[3]) > _MOST:
        return f"heads of {query.shape[3]} and {value.shape[3]} are wider than {_MOST}"
    return None

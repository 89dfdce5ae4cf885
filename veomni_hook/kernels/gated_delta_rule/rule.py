"""What both forms of the gated delta rule in Triton share: one decay per head or per channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from veomni_hook.kernels.gated_delta_rule.chunks import LENGTH
from veomni_hook.kernels.gated_delta_rule.scans import Parts, Scanned, Scans, squares_of, state_of
from veomni_hook.kernels.gated_delta_rule.tables import Tables, tables_of
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch
from veomni_hook.kernels.shared.operators import operator

__all__ = ["Launches", "Operands", "rule", "unfit"]

Tensor = torch.Tensor
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, Tensor? cu_seqlens"
_DTYPES = frozenset((torch.bfloat16, torch.float16))
_MOST = 256


class Launches(Scans, ABC):
    """The launches for one kind of operands: heads, heads a key head, widths, strides.

    Attributes:
        solve: computes what the scan needs of every chunk, its inverse among it.
        local: the same where what the backward saves is known.
    """

    solve: Launch
    local: Launch

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], normalise: bool
    ) -> None:
        super().__init__(device, dtype, sizes[:4])

    def parts(self, operands: Operands, tables: Tables, kept: Tensor, *, known: bool) -> Parts:
        """Return what the scan needs of every chunk; ``kept`` (`squares_of`) is filled unless ``known``."""
        query, chunks = operands[0], tables.starts.numel()
        q, k = (query.new_empty(chunks, query.shape[2], LENGTH, self.keys) for _ in range(2))
        sums = self.keys if self.channels else LENGTH
        total = query.new_empty(chunks, self.heads, sums, dtype=torch.float32)
        w = query.new_empty(chunks, self.heads, LENGTH, self.keys)
        u = query.new_empty(chunks, self.heads, self.values, LENGTH)
        p = kept[1] if self.channels else torch.empty_like(kept[0])
        parts = Parts(q, k, total, kept[0], w, u, p)
        if chunks:
            run = self.local if known else self.solve
            run((chunks, query.shape[2], 1), *operands, tables.starts, tables.ends, *parts)
        return parts

    def within_chunks(
        self, operands: Operands, tables: Tables, parts: Parts, scanned: Scanned, dy: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the operands."""
        results = tuple(
            torch.empty_like(operand, memory_format=torch.contiguous_format) for operand in operands
        )
        if chunks := tables.starts.numel():
            grid = (chunks, operands[0].shape[2], 1)
            self._gradients(grid, operands, (tables.starts, tables.ends), parts, scanned, dy, results)
        return results

    @abstractmethod
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
        """Write the gradients of the operands to ``results``; ``places``: where chunks begin and end."""


@lru_cache(maxsize=LAUNCHES)
def _launches(
    kind: type[Launches],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, ...],
    normalise: bool,
) -> Launches:
    return kind(device, dtypes[0], sizes, normalise)


def _prepared(kind: type[Launches], operands: Operands, normalise: bool) -> tuple[Operands, Launches]:
    """Return the operands as the kernels read them, and the launches."""
    q, k, v, g, beta = map(_by_token, operands)
    strided = (q, k, v, g) if kind.channels else (q, k, v)
    strides = [tensor.stride(dim) for tensor in strided for dim in (1, 2)]
    sizes = (v.shape[2], v.shape[2] // q.shape[2], q.shape[3], v.shape[3], *strides)
    dtypes = (q.dtype, g.dtype, beta.dtype)
    return (q, k, v, g, beta), _launches(kind, q.device, dtypes, sizes, normalise)


def _by_token(x: Tensor) -> Tensor:
    """Return x, or a copy if its elements are not next to each other, or its tokens have no one stride.

    What has no channels is read without strides.
    """
    if x.dim() < 4:
        return x.contiguous()
    fits = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if fits else x.contiguous()


def rule(
    name: str,
    kind: type[Launches],
    formula: Callable[..., tuple[Tensor, Tensor | None]],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Define the operators of one form of the rule, and return what `reference` says, with gradients.

    The backward saves what `squares_of` says.

    Args:
        name: of the forward; that of the backward ends in ``_backward``.
        kind: the launches.
        formula: the rule in PyTorch, as `reference.scalar_decay`.
    """

    @operator(
        partial(_outputs_fake, kind),
        f"{name}({_OPERANDS}, bool normalise, bool final) -> (Tensor, Tensor, Tensor)",
    )
    def outputs(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, g, beta, initial, cu_seqlens, normalise, final = call
        operands, launches = _prepared(kind, (q, k, v, g, beta), normalise)
        tables = tables_of(v, cu_seqlens)
        kept = squares_of(q, v, tables.starts.numel(), channels=kind.channels)
        parts = launches.parts(operands, tables, kept, known=False)
        return *launches.outputs(parts, tables, v, initial, final), kept

    @operator(
        _gradients_fake,
        f"{name}_backward(Tensor dy, Tensor? dfinal, {_OPERANDS}, Tensor kept, bool normalise,"
        " bool to_initial) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    )
    def slopes(*call: Any) -> tuple[Tensor, ...]:
        dy, dfinal, q, k, v, g, beta, initial, cu_seqlens, kept, normalise, to_initial = call
        operands, launches = _prepared(kind, (q, k, v, g, beta), normalise)
        tables, dy = tables_of(v, cu_seqlens), dy.contiguous()
        parts = launches.parts(operands, tables, kept, known=True)
        scanned, dinitial = launches.scanned(parts, tables, dy, initial, dfinal, to_initial)
        return (*launches.within_chunks(operands, tables, parts, scanned, dy), dinitial)

    def gradients(
        saved: Sequence[Any],
        rest: tuple[Tensor | None, bool, bool],
        wanted: Sequence[bool],
        dy: Tensor | None,
        dfinal: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        *operands, initial, kept = saved
        cu_seqlens, normalise, final = rest
        dy = torch.zeros_like(operands[2]) if dy is None else dy
        options = cu_seqlens, kept, normalise, wanted[5]
        *others, last = slopes(dy, dfinal if final else None, *operands, initial, *options)
        return *others, last if initial is None else last.to(initial.dtype)

    def definition(*operands: object) -> tuple[Tensor, Tensor | None]:
        *tensors, cu_seqlens, normalise, _ = operands
        return formula(*tensors, True, normalise, cu_seqlens)

    # Not saved as a tensor: ``cu_seqlens``. What the host knows of it belongs to this object.
    run = differentiable(outputs, gradients, definition, tensors=6, results=2, sparse=True)

    def computed(
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
        options = (bool(use_qk_l2norm_in_kernel), bool(output_final_state))
        output, final = run(query, key, value, g, beta, initial_state, cu_seqlens, *options)
        return output, final if output_final_state else None

    return computed


def _outputs_fake(kind: type[Launches], *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, *_, cu_seqlens, _, final = call
    # Traced code has no boundaries: `refuses` leaves such calls to upstream.
    rows, positions = v.shape[:2]
    samples = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
    kept = squares_of(q, v, rows * -(-positions // LENGTH), channels=kind.channels)
    return v.new_empty(v.shape), state_of(v, q.shape[3], samples if final else 0), kept


def _gradients_fake(*call: Any) -> tuple[Tensor, ...]:
    _, _, q, k, v, g, beta, _, cu_seqlens, _, _, to_initial = call
    samples = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dinitial = state_of(v, q.shape[3], samples if to_initial else 0)
    return (*(tensor.new_empty(tensor.shape) for tensor in (q, k, v, g, beta)), dinitial)


def unfit(owner: object, query: Tensor, key: Tensor, value: Tensor, *others: object) -> str | None:
    """Return why the kernels refuse operands of these dtypes and sizes, beside `operand_checks`, or None."""
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    if max(query.shape[3], value.shape[3]) > _MOST:
        return f"heads of {query.shape[3]} and {value.shape[3]} are wider than {_MOST}"
    return None

"""What both forms of the gated delta rule in Triton share: one decay per head or per channel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from veomni_hook.kernels.gated_delta_rule.chunks import LENGTH
from veomni_hook.kernels.gated_delta_rule.scans import Parts, Scanned, Scans, state_of
from veomni_hook.kernels.gated_delta_rule.tables import Tables, tables_of
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.launch import Launch
from veomni_hook.kernels.shared.operators import define_op

__all__ = ["Launches", "Operands", "by_token", "found", "kept", "operators", "unfit"]

Tensor = torch.Tensor
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, Tensor? cu_seqlens"
_DTYPES = frozenset((torch.bfloat16, torch.float16))
_MOST = 256


class Launches:
    """The launches for one kind of operands.

    Attributes:
        scans: those of the scan over chunks.
        solve: computes what the scan needs of every chunk, its inverse among it.
        local: the same where the inverses are known.
    """

    scans: Scans
    solve: Launch
    local: Launch

    def parts(self, operands: Operands, tables: Tables, solved: Tensor | None) -> Parts:
        """Return what the scan needs of every chunk; ``solved``: the inverses, if they are known."""
        query = operands[0]
        chunks = tables.starts.numel()
        parts = self.scans.new_parts(query, chunks, solved)
        if chunks:
            run = self.solve if solved is None else self.local
            run((chunks, query.shape[2], 1), *operands, tables.starts, tables.ends, *parts)
        return parts

    def within_chunks(
        self, operands: Operands, tables: Tables, parts: Parts, scanned: Scanned, dy: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the operands."""
        raise NotImplementedError


def operators(name: str, prepared: Callable[..., tuple[Operands, Launches]]) -> tuple[Any, Any]:
    """Define two operators, of one form of the rule, and return functions that call them.

    The first takes q, k, v, g, beta, the initial states or None, cu_seqlens or None, whether to normalise and
    whether final states are wanted. It returns the outputs, the final states, and every chunk's inverse
    ``[chunks, heads, 64, 64]``. The second takes the gradients of outputs and final states (or None), the
    first seven operands, the inverses, whether to normalise, and whether the initial states need a gradient.
    It returns the gradients of the first five operands and of the initial states.

    Args:
        name: of the first operator; that of the second ends in ``_backward``.
        prepared: takes q, k, v, g, beta and whether to normalise; returns these operands as the kernels read
            them, and the launches.
    """

    def outputs(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        normalise: bool,
        final: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        operands, launches = prepared(q, k, v, g, beta, normalise)
        tables = tables_of(v, cu_seqlens)
        parts = launches.parts(operands, tables, None)
        return *launches.scans.outputs(parts, tables, v, initial, final), parts.solved

    def slopes(
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
        normalise: bool,
        to_initial: bool,
    ) -> tuple[Tensor, ...]:
        operands, launches = prepared(q, k, v, g, beta, normalise)
        tables, dy = tables_of(v, cu_seqlens), dy.contiguous()
        parts = launches.parts(operands, tables, solved)
        scanned, dinitial = launches.scans.gradients(parts, tables, dy, initial, dfinal, to_initial)
        return (*launches.within_chunks(operands, tables, parts, scanned, dy), dinitial)

    forward = define_op(
        f"{name}({_OPERANDS}, bool normalise, bool final) -> (Tensor, Tensor, Tensor)", outputs, _outputs_fake
    )
    backward = define_op(
        f"{name}_backward(Tensor dy, Tensor? dfinal, {_OPERANDS}, Tensor solved, bool normalise,"
        " bool to_initial) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        slopes,
        _gradients_fake,
    )
    return forward, backward


def kept(ctx: Any, forward: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return what ``forward`` computes, and keep in ``ctx`` what its gradients need."""
    *tensors, cu_seqlens, normalise, final = arguments
    output, last, solved = forward(*arguments)
    ctx.save_for_backward(*tensors, solved)
    # Not saved as a tensor: what the host knows of it belongs to this object.
    ctx.cu_seqlens, ctx.normalise, ctx.final = cu_seqlens, normalise, final
    ctx.set_materialize_grads(False)
    return output, last


def found(
    ctx: Any,
    backward: Callable[..., Any],
    formula: Callable[..., tuple[Tensor, Tensor | None]],
    dy: Tensor | None,
    dfinal: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments that `kept` was given; ``formula`` is the rule in PyTorch."""
    *tensors, initial, solved = ctx.saved_tensors
    if is_recorded():
        # Results without a gradient count as zero.
        options = {"output_final_state": True, "cu_seqlens": ctx.cu_seqlens}
        rule = partial(formula, use_qk_l2norm_in_kernel=ctx.normalise, **options)
        incoming = dy, dfinal if ctx.final else None
        return *gradients(rule, (*tensors, initial), ctx.needs_input_grad[:6], incoming), None, None, None
    dy = torch.zeros_like(tensors[2]) if dy is None else dy
    dfinal = dfinal if ctx.final else None
    wanted = ctx.needs_input_grad
    *others, last = backward(dy, dfinal, *tensors, initial, ctx.cu_seqlens, solved, ctx.normalise, wanted[5])
    if initial is not None and wanted[5]:
        last = last.to(initial.dtype)
    results = zip((*others, last), wanted, strict=False)
    return (*(each if need else None for each, need in results), None, None, None)


def by_token(x: Tensor) -> Tensor:
    """Return x, or a copy if its elements are not next to each other, or its tokens have no one stride."""
    fits = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if fits else x.contiguous()


def _outputs_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    normalise: bool,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # Traced code has no boundaries: `refuses` leaves such calls to upstream.
    rows, positions, heads, _ = v.shape
    samples = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
    solved = q.new_empty(rows * -(-positions // LENGTH), heads, LENGTH, LENGTH)
    return v.new_empty(v.shape), state_of(v, q.shape[3], samples if final else 0), solved


def _gradients_fake(
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
    normalise: bool,
    to_initial: bool,
) -> tuple[Tensor, ...]:
    samples = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dinitial = state_of(v, q.shape[3], samples if to_initial else 0)
    return (*(each.new_empty(each.shape) for each in (q, k, v, g, beta)), dinitial)


def unfit(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Return why the kernels cannot compute operands of these dtypes and sizes, or None."""
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    if max(query.shape[3], value.shape[3]) > _MOST:
        return f"heads of {query.shape[3]} and {value.shape[3]} are wider than {_MOST}"
    return None

"""Notes of `explain` on the batch-invariant mode: what of a model is not known to have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from veomni_hook.batch_invariance import mode
from veomni_hook.kernels.explain.rows import Row
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.registry import registry

if TYPE_CHECKING:
    from torch import nn

__all__ = ["notes_on_invariance"]

_SDPA = "sdpa"


def notes_on_invariance(model: nn.Module, rows: Iterable[Row], device: str) -> Iterator[str]:
    """Yield a line if the mode is on, and one for each part of ``model`` that may break it on ``device``."""
    if not mode.is_on():
        return
    doubts = list(_doubts(model, rows, device))
    yield "batch-invariant: rows of a forward pass have the same bits in any batch" + (
        ", except where one of these computes them" if doubts else ""
    )
    yield from (f"not batch-invariant: {doubt}" for doubt in doubts)


def _doubts(model: nn.Module, rows: Iterable[Row], device: str) -> Iterator[str]:
    doubtful = {name for name, op in registry.ops().items() if device not in op.invariant}
    unserved = {(row.op, row.kind, row.reason) for row in rows if row.backend == EAGER and row.op in doubtful}
    for op, kind, reason in sorted(unserved):
        yield f"{op} in {kind}: upstream's code ({reason})"
    configs = (getattr(module, "config", None) for module in model.modules())
    chosen: set[Any] = {getattr(config, "_attn_implementation", None) for config in configs} - {None, _SDPA}
    for name in sorted(map(str, chosen)):
        yield f"attention: attn_implementation={name!r}; only {_SDPA!r} is"
    # Convolutions choose their algorithm by the batch; those that are one product have no overlap.
    kinds = {
        type(module).__name__
        for module in model.modules()
        if type(module).__name__ in ("Conv1d", "Conv2d", "Conv3d")
        and getattr(module, "stride", None) != getattr(module, "kernel_size", None)
    }
    for kind in sorted(kinds):
        yield f"{kind}: torch's convolution"

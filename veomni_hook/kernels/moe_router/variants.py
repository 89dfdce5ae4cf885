"""The variants of routing."""

from __future__ import annotations

from dataclasses import replace

from veomni_hook.kernels.selection.declaration import NPU, Variant
from veomni_hook.kernels.selection.table import TRITON, backend, op

__all__ = ["OP"]

_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses_in_autocast",
    requires=TRITON,
    priority=10,
    traceable=True,
    beats_inductor=True,
    invariant=("cuda",),
    description="one launch forward and one backward; saves the chosen logits; deterministic",
)
_NPU = backend(
    "npu",
    ".npu:{variant}",
    refuses=".npu:refuses_in_autocast",
    requires=NPU,
    priority=10,
    description="npu_moe_gating_top_k_softmax; the backward is a formula over the chosen experts",
)
_TORCH = backend(
    "torch",
    ".torch:{variant}",
    refuses=".torch:refuses",
    traceable=True,
    description="computes weights only for the chosen experts and saves nothing for the others",
)
_TORCH_ON_NPU = replace(
    _TORCH,
    backend="npu",
    requires=NPU,
    traceable=False,
    description="the torch kernel; some torch_npu releases have no operator with a gradient for it",
    automatic=False,
)

VARIANTS = {
    "softmax_topk": Variant(
        "top_k of softmax(float32(logits)); weights / sum(weights) if normalise",
        kernels=(
            replace(_TRITON, refuses=".triton:refuses"),
            replace(_NPU, refuses=".npu:refuses"),
            _TORCH,
        ),
    ),
    "topk_softmax": Variant(
        "softmax over the top_k of logits",
        kernels=(_TRITON, _NPU, _TORCH),
    ),
    "biased_topk": Variant(
        "scores = score(logits) at the top_k of scores + bias; weights / (sum(weights) + epsilon)",
        kernels=(_TRITON, _TORCH_ON_NPU, _TORCH),
    ),
    "grouped_topk": Variant(
        "scores = sigmoid(logits) at the top_k of scores + bias within the topk_group best groups; "
        "weights / (sum(weights) + 1e-20) if normalise",
        kernels=(_TRITON, _TORCH_ON_NPU, _TORCH),
    ),
}
OP = op("moe_router", VARIANTS, invariant=("cpu",), prepares=".seam:watch")

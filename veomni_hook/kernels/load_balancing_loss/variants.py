"""The variants of the loss."""

from __future__ import annotations

from dataclasses import replace

from veomni_hook.kernels.selection.declaration import NPU, Variant
from veomni_hook.kernels.selection.table import ANYWHERE, TRITON, backend, op

__all__ = ["OP"]

_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    invariant=("cuda",),
    description="one launch forward and one backward for all layers; deterministic; no device sync",
)
_TORCH = backend(
    "torch",
    ".torch:{variant}",
    invariant=("cpu", "cuda"),
    description="layer by layer, without one_hot; no device sync",
)
# Also for users who select npu for the op: torch_npu has no operator for it.
_NPU = replace(_TORCH, backend="npu", requires=NPU, automatic=False)
_KERNELS = (_TRITON, _TORCH, _NPU)
_UNASKED = "the model was never asked for this loss: output_router_logits is off"

VARIANTS = {
    "softmax_topk": Variant(
        "num_experts * sum_e share_e * probability_e over all layers' tokens that the mask keeps: "
        "probability = softmax(logits), share = how often e is in its top_k",
        unasked=_UNASKED,
        kernels=_KERNELS,
        refuses=".row_weights:refuses",
    ),
    "softmax_topk_in_dtype": Variant(
        "the same with mean probabilities in the dtype of the logits, not in float32",
        unasked=_UNASKED,
        kernels=_KERNELS,
        refuses=".row_weights:refuses",
    ),
}
OP = op("load_balancing_loss", VARIANTS, invariant=ANYWHERE)

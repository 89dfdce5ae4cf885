"""The variants of the loss and of a classifier's scores."""

from __future__ import annotations

from dataclasses import replace

from veomni_hook.kernels.selection.declaration import NPU, REFERENCE, REFERENCE_DESCRIPTION, Variant
from veomni_hook.kernels.selection.table import LIGER, TRITON, backend, op

__all__ = ["OP"]

_TRITON = backend(
    "triton",
    ".triton:causal_lm_output",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    invariant=("cuda",),
    description="rows in chunks, cuBLAS products; the forward also computes the gradients",
    traceable=True,
    beats_inductor=True,
)
_NPU = backend(
    "npu",
    ".npu:causal_lm_output",
    refuses=".npu:refuses",
    requires=NPU,
    priority=10,
    description="rows in chunks, npu_cross_entropy_loss; PyTorch for what this operator lacks",
    traceable=True,
    beats_inductor=True,
)
_TORCH = backend(
    "torch",
    ".torch:causal_lm_output",
    loses=".torch:loses",
    invariant=("cpu",),
    description="rows in chunks; the forward also computes the gradients; skips ignored positions",
    traceable=True,
)
_LIGER = backend(
    "liger",
    ".liger:causal_lm_output",
    refuses=".liger:refuses",
    requires=LIGER,
    description="liger_kernel's fused linear cross-entropy",
    automatic=False,
)
_REFERENCE = backend(
    REFERENCE, ".causal_lm:reference_output", description=REFERENCE_DESCRIPTION, automatic=False
)
_POOLED = backend(
    "torch",
    ".last_token:Scores",
    refuses=".last_token:refuses",
    invariant=("cpu", "cuda"),
    description="applies the score module only to the position that is used, on any device",
)

VARIANTS = {
    "next_token": Variant(
        "cross_entropy(float32(t(x @ weight.T + bias)), next label): mean, or sum / num_items; "
        "t scales and caps; loss_options add smoothing, z-loss, weights and statistics of tokens",
        ".reference:linear_cross_entropy",
        operands=("model", "hidden_states", "head", "labels", "vocab_size", "loss_kwargs", "options"),
        unasked="the model was never asked for a loss: its forward got no labels, "
        "or the trainer computes the loss itself, as TRL's do",
        kernels=(_TRITON, _NPU, _TORCH, _LIGER, _REFERENCE),
        refuses=".causal_lm:refuses",
        asks=".options:token_outputs_of",
        settles=".options:leave_to_upstream",
    ),
    "last_token": Variant(
        "score(x)[row, last position of row]",
        kernels=(
            _POOLED,
            # For users who select Triton or torch_npu for the op; neither could do more here.
            replace(_POOLED, backend="triton", automatic=False),
            replace(_POOLED, backend="npu", requires=NPU, automatic=False),
        ),
    ),
}
OP = op("linear_cross_entropy", VARIANTS, invariant=("cpu",))

"""The auxiliary loss that balances a mixture-of-experts model's tokens over its experts.

Called as ``kernel(gate_logits, num_experts, top_k, attention_mask)``: a tuple with ``[tokens, num_experts]``
for each layer, and a mask ``[batch, length]`` with ``batch * length == tokens``, or None.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.registry import NPU, Kernel, Op, Requirement, Variant

_UNASKED = "the model was never asked for this loss: output_router_logits is off"

OP = Op(
    "load_balancing_loss",
    variants={
        "softmax_topk": Variant(
            "num_experts * sum_e share_e * probability_e over all layers' tokens that the mask keeps: "
            "probability = softmax(logits), share = how often e is in its top_k",
            "veomni_hook.kernels.load_balancing_loss.reference:softmax_topk",
            unasked=_UNASKED,
        ),
        "softmax_topk_in_dtype": Variant(
            "the same with mean probabilities in the dtype of the logits, not in float32",
            "veomni_hook.kernels.load_balancing_loss.reference:softmax_topk_in_dtype",
            unasked=_UNASKED,
        ),
    },
)

_HERE = "veomni_hook.kernels.load_balancing_loss"

KERNELS = (
    *(
        Kernel(
            op="load_balancing_loss",
            variant=variant,
            backend="triton",
            load=f"{_HERE}.triton:{variant}",
            refuses=f"{_HERE}.triton:refuses",
            requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
            priority=10,
            description="one launch forward and one backward for all layers; deterministic; no device sync",
        )
        for variant in OP.variants
    ),
    *(
        Kernel(
            op="load_balancing_loss",
            variant=variant,
            backend=backend,
            load=f"{_HERE}.torch:{variant}",
            refuses=f"{_HERE}.torch:refuses",
            requires=NPU if backend == "npu" else Requirement(),
            description="layer by layer, without one_hot; no device sync",
            automatic=backend == "torch",
        )
        # Also registered for users who select npu for the op: torch_npu has no operator for it.
        for backend in ("torch", "npu")
        for variant in OP.variants
    ),
)

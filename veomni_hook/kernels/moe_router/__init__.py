"""The router of a mixture-of-experts layer: the experts of each token, and their weights.

Guards come after the projection, which stays upstream's. They ask with ``slot.kernel(router, router_logits)``
and call ``kernel(router_logits, ...)``, which returns ``(weights, indices)``, both ``[tokens, top_k]``.
Upstream also casts and scales the weights afterwards.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.registry import NPU, Kernel, Op, Requirement, Variant

_REFERENCE = "veomni_hook.kernels.moe_router.reference"

OP = Op(
    "moe_router",
    variants={
        "softmax_topk": Variant(
            "top_k of softmax(float32(logits)); weights / sum(weights) if normalise",
            f"{_REFERENCE}:softmax_topk",
        ),
        "topk_softmax": Variant("softmax over the top_k of logits", f"{_REFERENCE}:topk_softmax"),
        "biased_topk": Variant(
            "scores = score(logits) at the top_k of scores + bias; weights / (sum(weights) + epsilon)",
            f"{_REFERENCE}:biased_topk",
        ),
        "grouped_topk": Variant(
            "scores = sigmoid(logits) at the top_k of scores + bias within the topk_group best groups; "
            "weights / (sum(weights) + 1e-20) if normalise",
            f"{_REFERENCE}:grouped_topk",
        ),
    },
)

_HERE = "veomni_hook.kernels.moe_router"

KERNELS = (
    *(
        Kernel(
            op="moe_router",
            variant=variant,
            backend="triton",
            load=f"{_HERE}.triton:{variant}",
            refuses=f"{_HERE}.triton:{'refuses' if variant == 'softmax_topk' else 'refuses_in_autocast'}",
            requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
            priority=10,
            traceable=True,
            beats_inductor=True,
            description="one launch forward and one backward; saves the chosen logits; deterministic",
        )
        for variant in OP.variants
    ),
    *(
        Kernel(
            op="moe_router",
            variant=variant,
            backend="npu",
            load=f"{_HERE}.npu:{variant}",
            refuses=f"{_HERE}.npu:{'refuses' if variant == 'softmax_topk' else 'refuses_in_autocast'}",
            requires=NPU,
            priority=10,
            description="npu_moe_gating_top_k_softmax; the backward is a formula over the chosen experts",
        )
        for variant in ("softmax_topk", "topk_softmax")
    ),
    *(
        Kernel(
            op="moe_router",
            variant=variant,
            backend="npu",
            load=f"{_HERE}.torch:{variant}",
            refuses=f"{_HERE}.torch:refuses",
            requires=NPU,
            description="the torch kernel; some torch_npu releases have no operator with a gradient for it",
            automatic=False,
        )
        for variant in ("biased_topk", "grouped_topk")
    ),
    *(
        Kernel(
            op="moe_router",
            variant=variant,
            backend="torch",
            load=f"{_HERE}.torch:{variant}",
            refuses=f"{_HERE}.torch:refuses",
            traceable=True,
            description="computes weights only for the chosen experts and saves nothing for the others",
        )
        for variant in OP.variants
    ),
)

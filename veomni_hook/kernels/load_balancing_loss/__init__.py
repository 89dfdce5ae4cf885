"""The auxiliary loss that spreads a mixture-of-experts model's tokens over its experts.

Called as ``kernel(gate_logits, num_experts, top_k, attention_mask)``: a tuple with ``[tokens, num_experts]``
for every layer, and a mask that is ``[batch, length]`` with ``batch * length == tokens``, or None.
"""

from __future__ import annotations

from veomni_hook.kernels.registry import Kernel, Op, Variant

OP = Op(
    "load_balancing_loss",
    variants={
        "softmax_topk": Variant(
            "num_experts * sum_e share_e * probability_e over all layers' tokens that the mask keeps: "
            "probability = softmax(logits), share = how often e is in its top_k",
            "veomni_hook.kernels.load_balancing_loss.reference:softmax_topk",
        ),
        "softmax_topk_in_dtype": Variant(
            "the same with mean probabilities in the dtype of the logits, not in float32",
            "veomni_hook.kernels.load_balancing_loss.reference:softmax_topk_in_dtype",
        ),
    },
)

KERNELS: tuple[Kernel, ...] = ()

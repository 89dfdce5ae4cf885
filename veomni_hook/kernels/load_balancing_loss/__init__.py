"""The auxiliary loss that balances a mixture-of-experts model's tokens over its experts.

Called as ``kernel(gate_logits, num_experts, top_k, attention_mask)``: a tuple with ``[tokens, num_experts]``
for each layer, and a mask ``[batch, length]`` with ``batch * length == tokens``, or None. `variants` declares
the op.
"""

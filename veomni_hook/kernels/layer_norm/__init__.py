"""Layer normalisation of the last dimension, ``(x - mean(x)) * rsqrt(var(x) + eps)``, weight, bias.

Guards ask and call with the operands of the variant's reference function, in its order:
``slot.kernel(self, hidden_states, weight, eps)``. `variants` declares the op.

The ops `nn_layer_norm` and `add_layer_norm` are calls of torch's ``nn.LayerNorm``, the second of a sum. Their
kernels are here, too, in `modules`.
"""

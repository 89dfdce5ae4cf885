"""RMS normalisation of the last dimension: ``x * rsqrt(mean(x^2) + eps)``, optionally with weight and gate.

Guards ask and call with the operands of the variant's reference function, in its order:
``slot.kernel(self, hidden_states, weight, eps)``. `variants` declares the op.
"""

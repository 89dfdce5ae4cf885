"""A residual addition and torch's ``nn.LayerNorm`` of its sum, in one pass.

Called with ``(residual, hidden_states, norm)``; returns ``(sum, normalised)``. The sum is rounded to its
dtype, as upstream's ``residual + hidden_states``; the norm uses the rounded sum.

Guards ask with ``slot.kernel(layer, residual, hidden_states, norm)``. A kernel skips the call of the module
``norm``, as in `veomni_hook.kernels.nn_layer_norm`. A kernel computes unsupported operands with its
reference. `variants` declares the op, whose code is that of `veomni_hook.kernels.layer_norm`.
"""

"""A residual addition and the RMSNorm of its sum, in one pass.

Called with ``(residual, hidden_states, weight, eps)``; returns ``(sum, normalised)``. The sum is rounded to
its dtype, as upstream's ``residual + hidden_states``; the norm uses the rounded sum.

Guards ask with ``slot.kernel(layer, residual, hidden_states, norm, norm_class)``. A kernel skips the call of
the module ``norm``, so every kernel here refuses unless ``norm`` is a plain ``norm_class`` and nothing
observes its calls (`calls`). A kernel computes unsupported operands with its reference. `variants` declares
the op.
"""

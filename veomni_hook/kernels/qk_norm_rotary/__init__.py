"""RMSNorm of each head of queries and keys, then their rotary embedding, as one op.

An attention asks before its projections: ``slot.kernel(self, hidden_states, q_norm, k_norm, norm class,
rotary function, cos, sin, module name)``. The kernel is called after the projections and replaces both norms
and the rotary function. It gets the operands of the variant's reference function, in its order. `variants`
declares the op.
"""

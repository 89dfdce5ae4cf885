"""Rotary position embedding of queries and keys, or of one tensor.

Call sites ask through ``slot.at(self, upstream)``. Kernels get the operands of the variant's reference,
usually ``kernel(q, k, cos, sin, unsqueeze_dim)``. Their rules also get the upstream function as last operand,
so that a kernel that transformers' own ``use_kernels`` put in its place is respected. `variants` declares the
op.
"""

"""The logarithm of a decay per head, and the strength of what is written: inputs of linear attention.

Guards ask with ``slot.kernel(module, a, log_rate, bias)`` (and ``b``) and call the kernel with the same.
`variants` declares the op.
"""

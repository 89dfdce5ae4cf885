"""Scores by which sparse attention selects the keys of each query: a sum over heads of rectified products.

Guards ask with ``slot.kernel(module, query, key, scale)`` and call the kernel with
``(query, key, weights, scale)``. `variants` declares the op.
"""

"""Attention within the segments of a packed sequence: ``cu_seqlens`` are the boundaries.

Vision towers attend within an image, a frame or a window, audio towers within a chunk. Upstream splits query,
key and value at the boundaries, which makes the host wait for their values in every layer, and calls an
attention function for each segment. Kernels replace these calls only where the function is transformers' own
``sdpa`` (`operand_checks`). `variants` declares the op.
"""

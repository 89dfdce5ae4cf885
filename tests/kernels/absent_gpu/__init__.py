"""Triton's kernels, compiled for GPUs that are not there: whether they compile, and fit into shared memory.

The interpreter does not know that. `python -m tests.kernels.absent_gpu sm90 moe_experts` compiles what one op
launches, and prints what came of it (tests: test_absent_gpu.py).
"""

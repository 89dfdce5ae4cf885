"""The experts of a mixture-of-experts layer: each token goes through the experts that its router chose.

Kernels are called with the hidden states, the router's indices and weights, then the experts' own operands,
in the order of the variant's reference function; guards ask with the same operands. The user's choice in
transformers' ``experts_implementation`` takes precedence over ``auto``. `variants` declares the op.
"""

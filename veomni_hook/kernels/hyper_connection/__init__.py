"""Hyper-connections: the residual is several streams, summed in front of a block and mixed behind it.

The streams are ``[batch, length, N, D]``. The weights of the sum, of the block's output and of the mixture
come from a projection of all streams of a token. Sinkhorn's iterations make the mixture doubly stochastic.
`variants` declares the op.
"""

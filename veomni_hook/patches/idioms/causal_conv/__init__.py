"""Causal convolutions of one channel at a time, in front of linear attention and state spaces."""

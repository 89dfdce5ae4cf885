"""A residual addition followed by an RMSNorm of the sum."""

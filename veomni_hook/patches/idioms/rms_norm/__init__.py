"""RMSNorm, plain, gated, and with other roundings."""

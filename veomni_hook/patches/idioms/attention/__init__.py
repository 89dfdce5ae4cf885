"""Attention with sinks or a softcap, which torch's fused attention cannot compute."""

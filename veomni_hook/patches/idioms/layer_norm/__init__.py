"""LayerNorm, written out or around torch's operator."""

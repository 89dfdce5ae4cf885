"""A residual addition followed by torch's ``nn.LayerNorm`` of the sum."""

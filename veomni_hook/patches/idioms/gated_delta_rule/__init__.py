"""Linear attention by the gated delta rule, chunk by chunk."""

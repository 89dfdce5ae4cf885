"""Experts: the loop over them, who chooses their implementation, and the loading of their checkpoints."""

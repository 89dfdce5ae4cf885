"""Calls of modules that ``__init__`` creates from torch's ``nn.LayerNorm``."""

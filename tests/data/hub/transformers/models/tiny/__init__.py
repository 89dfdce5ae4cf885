"""A lazy model package."""

from ...lazy import make_lazy

make_lazy(__name__, {"TinyNorm": "modeling_tiny", "TinyModel": "modeling_tiny"})

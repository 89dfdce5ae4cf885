"""A stand-in for transformers: the same package layout and lazy modules, no dependencies."""

from .lazy import make_lazy

__version__ = "5.99.0"

make_lazy(__name__, {"TinyNorm": "models.tiny", "TinyModel": "models.tiny"})

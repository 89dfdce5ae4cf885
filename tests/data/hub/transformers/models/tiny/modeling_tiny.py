"""A model of two classes."""

from ...pytorch_utils import double


class TinyNorm:
    """Adds a bias."""

    def __init__(self, bias=1):
        self.bias = bias

    def forward(self, x):
        # upstream's own comment
        return double(x) + self.bias


class TinyModel:
    """One norm."""

    def __init__(self):
        self.norm = TinyNorm()

    def forward(self, x: "TinyNorm") -> int:
        return self.norm.forward(x)


__all__ = ["TinyModel", "TinyNorm"]

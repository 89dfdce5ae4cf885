"""A model of which an idiom knows the code."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Scaled:
    scale = 2

    def forward(self, x: "torch.Tensor"):
        return self.scale * x


class Other:
    def forward(self, x: "torch.Tensor"):
        return x + 1

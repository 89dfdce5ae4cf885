"""Whether kernels compute in the smallest parts that are fast: their tensors then need little memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SIZES"]


@dataclass
class Sizes:
    """The sizes in this process; ``least``: no more rows at a time than products need."""

    least: bool = False


SIZES = Sizes()

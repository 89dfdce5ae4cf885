"""Where torch's ``clamp`` lets gradients through; kernels with a backward of their own do the same."""

from __future__ import annotations

import re

import torch

__all__ = ["AT_LIMIT"]

#: Whether a value that equals its limit gets a gradient. From torch 2.14 on, it gets none from a number.
AT_LIMIT = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 14)

# Copyright of nobody.
"""A small upstream module."""

from dataclasses import dataclass
from functools import wraps
from typing import Optional


def traced(function):
    @wraps(function)
    def call(*args, **kwargs):
        return ("traced", function(*args, **kwargs))

    return call


@dataclass
class TinyOutput:
    value: int = 0


class TinyNorm:
    def __init__(self, size, eps=1e-6):
        self.size = size
        self.eps = eps

    def forward(self, hidden_states: Optional[int]):
        return hidden_states


@traced
def rotate(q, k):
    return q, k


class TinyBase:
    def __init__(self, config, layer_idx=None):
        self.config = config
        self.layer_idx = layer_idx


class TinyAttention(TinyBase):
    def __init__(self, config, layer_idx=None):
        super().__init__(config, layer_idx)
        self.norm = TinyNorm(4)

    @traced
    def forward(self, hidden_states, position_ids=None, **kwargs):
        # upstream
        return rotate(hidden_states, hidden_states)


class TinyModel(TinyBase): ...


class TinyForTokenClassification(TinyBase):
    pass


__all__ = ["TinyModel", "TinyAttention", "TinyForTokenClassification"]

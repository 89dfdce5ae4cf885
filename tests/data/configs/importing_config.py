"""Imports the very module that it patches, and resolves its classes through the lazy packages."""

from transformers import TinyModel
from transformers.models.tiny.modeling_tiny import TinyNorm

from veomni_hook import PatchConfig

config = PatchConfig("transformers.models.tiny.modeling_tiny")


@config.override_method("TinyNorm.forward")
def forward(self, x):
    return double(x) + self.bias + 100  # noqa: F821


assert TinyModel().norm.__class__ is TinyNorm
assert TinyNorm().forward(1) == 3, "a config sees upstream code"

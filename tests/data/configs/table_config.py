"""Its patch comes from a table in a sibling module."""

from tables import BONUS

from veomni_hook import PatchConfig

config = PatchConfig("transformers.models.tiny.modeling_tiny")
config.add_post_import_block(f"BONUS = {BONUS}")


@config.override_method("TinyNorm.forward")
def forward(self, x):
    return double(x) + self.bias + BONUS

"""Patches TinyNorm and the circular pair."""

from veomni_hook import PatchConfig

config = PatchConfig("transformers.models.tiny.modeling_tiny", description="tiny, patched")
pair_a = PatchConfig("transformers.models.pair_a.modeling_pair_a")
pair_b = PatchConfig("transformers.models.pair_b.modeling_pair_b")
namespaced = PatchConfig("transformers.models.namespaced.modeling_namespaced")
configs = [pair_a, pair_b, namespaced]


@config.override_method("TinyNorm.forward", description="a hundred more")
def forward(self, x):
    # Patch.1: the point of it all
    return double(x) + self.bias + 100  # noqa: F821


@pair_a.replace_function("which")
def which_a():
    return "patched a"


@pair_b.replace_function("which")
def which_b():
    return "patched b"


@namespaced.replace_function("which")
def which_namespaced():
    return "patched"

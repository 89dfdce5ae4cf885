"""GPU patches of the tiny model, written as VeOmni's configs are."""

from patchgen_double import PatchConfig, create_patch_from_external
from patchgen_double.modeling_tiny import TinyOutput

config = PatchConfig(
    source_module="patchgen_double.modeling_tiny",
    target_file="patched_modeling_tiny_gpu.py",
    description="tiny model, GPU",
)

config.add_import("operator", names=["mul as times"])
config.add_import("math", is_from_import=False)
config.drop_import_names("Optional")
config.add_post_import_block(
    """
    # slots
    try:
        from typing import Optional
    except ImportError:
        Optional = None
    """
)
config.exclude_from_output("TinyForTokenClassification")
config.patches.append(create_patch_from_external("TinyNorm", "decimal", "Decimal", description="a number"))


# Helper block.
# 1. doubles
@config.add_helper
def doubled(value):
    return times(value, 2)  # noqa: F821


@config.add_helper_after("TinyOutput")
class TinyOutputWithLoss(TinyOutput):
    loss = 1.0


# ----------------------------------------
# Patch: TinyAttention.forward
# 1. doubles
# ----------------------------------------
@config.override_method(
    "TinyAttention.forward",
    description="double (twice)",
)
def tiny_attention_forward(self, hidden_states, position_ids=None, **kwargs):
    # --- Patch.1 ---
    return doubled(hidden_states)
    # --- Patch.1 ---


@config.override_method("TinyModel.dummy_forward", description="for FSDP")
def tiny_dummy_forward(self):
    return "dummy"


@config.replace_function("rotate")
def tiny_rotate(q, k):
    return k, q


@config.modify_init("TinyAttention")
def bind(original_init, self, config, layer_idx=None):
    original_init(self, config, layer_idx)
    self.bound = "gpu"

"""Checkpointed layers in unchanged scripts."""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.modeling_utils",
    description="layers are checkpointed as the setting `memory` says",
)

config.add_import(
    "veomni_hook.memory.checkpoint",
    ["chosen as veomni_chosen", "entered as veomni_entered", "wanted as veomni_checkpoints_wanted"],
)
config.rewrite(
    "PreTrainedModel._backward_compatibility_gradient_checkpointing",
    pattern='self.supports_gradient_checkpointing and getattr(self.config, "gradient_checkpointing", False)',
    replacement="veomni_checkpoints_wanted(self)",
    description="also where the setting asks for them: in a model that was just made",
)
config.rewrite(
    "PreTrainedModel._set_gradient_checkpointing",
    pattern="gradient_checkpointing_func",
    replacement="veomni_chosen(gradient_checkpointing_func)",
    matches=2,
    description="the function that calls a layer, of a model and of the layer itself",
)
config.rewrite(
    "PreTrainedModel.enable_input_require_grads",
    pattern="make_inputs_require_grads",
    replacement="veomni_entered(make_inputs_require_grads)",
    description="embeddings that require gradients are no leaf, which would stay on the device",
)

"""Models that were just made: float8, and copies of experts. Two configs cannot change one function."""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.modeling_utils",
    description="models that were just made are as the settings `precision` and `parallel` say",
)

config.add_import("veomni_hook.kernels.float8.layers", ["adapt as veomni_adapt"])
config.add_import("veomni_hook.parallel.expert_replicas", ["built as veomni_built"])
config.rewrite(
    "PreTrainedModel.post_init",
    pattern="self.init_weights()",
    replacement="veomni_adapt(self).init_weights()",
    description="before quantised layers and adapters take the place of others",
)
config.rewrite(
    "PreTrainedModel.post_init",
    pattern="self.get_expanded_tied_weights_keys(all_submodels=False)",
    replacement="veomni_built(self).get_expanded_tied_weights_keys(all_submodels=False)",
    description="models that are built from a config are checked when they are trained",
)

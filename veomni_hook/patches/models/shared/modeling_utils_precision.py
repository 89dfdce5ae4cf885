"""Linear layers with float8 products in unchanged scripts."""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.modeling_utils",
    description="linear layers multiply as the setting `precision` says",
)

config.add_import("veomni_hook.kernels.float8.layers", ["adapt as veomni_adapt"])
config.rewrite(
    "PreTrainedModel.post_init",
    pattern="self.init_weights()",
    replacement="veomni_adapt(self).init_weights()",
    description="in a model that was just made: quantised layers and adapters take the place of others later",
)

"""`Accelerator.prepare` of a model with divided experts: mixed precision, no DDP around it.

Applies only where the setting ``parallel`` has ``ep`` above 1.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="accelerate.accelerator",
    description="a model that transformers has divided when it loaded it is not wrapped again",
)

config.add_import("veomni_hook.parallel.expert_loading", ["is_ours as veomni_is_divided"])
config.rewrite(
    "Accelerator._prepare_one",
    pattern="self.prepare_model({model}, device_placement={placement})",
    replacement=(
        "self.prepare_model("
        "{model}, device_placement={placement}, evaluation_mode=veomni_is_divided({model}))"
    ),
    description="what accelerate calls evaluation mode: mixed precision and compilation alone",
)

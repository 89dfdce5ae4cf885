"""Batches that Trainer moves to a device itself: the host keeps the values of their integers.

Applies only where the setting ``host_values`` is on.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.trainer",
    description="the host keeps the values of a batch's integers",
)

config.add_import("veomni_hook.multimodal.batches", ["to as veomni_to"])
config.rewrite(
    "Trainer._prepare_input",
    pattern="data.to(**kwargs)",
    replacement="veomni_to(data, **kwargs)",
    description="notes the values when a tensor goes to the device",
)

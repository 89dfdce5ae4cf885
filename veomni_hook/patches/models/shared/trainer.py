"""Trainer's data loaders for evaluation, where nothing is shared: all processes read other data.

Applies only where the setting ``parallel`` has ``sp`` above 1.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.trainer",
    description="evaluation divides its data among all processes",
)

config.add_import("veomni_hook.parallel.data", ["prepared as veomni_prepared"])
config.rewrite(
    "Trainer._get_dataloader",
    pattern="self.accelerator.prepare(DataLoader(dataset, **dataloader_params))",
    replacement="veomni_prepared(self.accelerator, DataLoader(dataset, **dataloader_params), is_training)",
    description="which of the loaders are for training",
)

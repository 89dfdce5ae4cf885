"""Trainer: in evaluation nothing is shared, all processes read other data; tokens are counted once.

Applies only where the setting ``parallel`` has ``sp`` above 1.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    # A pattern, which matches this module alone: releases count tokens in methods of other names.
    source_module="transformers.[t]rainer",
    description="evaluation divides its data among all processes, tokens are counted once",
)

config.add_import("veomni_hook.parallel.data", ["once as veomni_once", "prepared as veomni_prepared"])
config.rewrite(
    "Trainer._get_dataloader",
    pattern="self.accelerator.prepare(DataLoader(dataset, **dataloader_params))",
    replacement="veomni_prepared(self.accelerator, DataLoader(dataset, **dataloader_params), is_training)",
    description="which of the loaders are for training",
)
config.rewrite(
    "Trainer.*",
    pattern="self.accelerator.gather({tokens}).sum().item()",
    replacement="veomni_once(self.accelerator.gather({tokens})).sum().item()",
    matches=None,
    description="the number of tokens seen",
)

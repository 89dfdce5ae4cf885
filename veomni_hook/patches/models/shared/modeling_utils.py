"""Attention over sequences that are split over processes: around whichever implementation the user chose.

Applies only where the setting ``parallel`` has ``sp`` above 1.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.modeling_utils",
    description="attention sees whole sequences where hidden states are split over processes",
)

config.add_import("veomni_hook.parallel.attention", ["over_sequence as veomni_over_sequence"])
config.rewrite(
    "AttentionInterface.get_interface",
    pattern="super().get({name}, {default})",
    replacement="veomni_over_sequence(super().get({name}, {default}))",
    description="the implementation gets all positions of this process's share of the heads",
)

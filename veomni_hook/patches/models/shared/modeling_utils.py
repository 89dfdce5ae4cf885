"""Around attention, whichever implementation the user chose.

Over sequences that are split over processes, and in layers that are checkpointed. Applies only where the
setting ``parallel`` has ``sp`` above 1, or with the setting ``memory``.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.modeling_utils",
    description="attention sees whole sequences where processes share them; checkpoints keep its results",
)

config.add_import("veomni_hook.parallel.attention", ["over_sequence as veomni_over_sequence"])
config.add_import("veomni_hook.memory.attention", ["kept as veomni_kept"])
config.rewrite(
    "AttentionInterface.get_interface",
    pattern="super().get({name}, {default})",
    replacement="veomni_kept(veomni_over_sequence(super().get({name}, {default})))",
    description="the implementation gets all positions of this process's share of the heads, and runs once",
)

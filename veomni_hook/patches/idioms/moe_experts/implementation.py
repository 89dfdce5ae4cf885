"""Where transformers sets the experts implementation: `veomni_hook.patches.idioms.implementations`."""

from __future__ import annotations

from veomni_hook.patches.idioms.implementations import Setting

__all__ = ["CANDIDATES", "OP", "find"]

OP = "moe_experts"
CANDIDATES = "nothing is counted: these are the switches of experts, not experts"

find = Setting(OP, "experts").sites

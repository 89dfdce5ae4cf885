"""Where transformers sets the attention implementation: `veomni_hook.patches.idioms.implementations`."""

from __future__ import annotations

from veomni_hook.patches.idioms.implementations import Setting

__all__ = ["CANDIDATES", "OP", "find"]

OP = "attention"
CANDIDATES = "nothing is counted: these are the switches of attention, not attention"

find = Setting(OP, "attn").sites

"""Models with vision or audio towers: what patched code calls, and what prepares their data.

The public names are resolved on first use, so importing this package imports no torch.
"""

from __future__ import annotations

from veomni_hook.on_use import imported_on_use

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from veomni_hook.multimodal.metadata import collate_metadata as collate_metadata
    from veomni_hook.multimodal.positions import position_ids as position_ids

_HOME = {
    "collate_metadata": "veomni_hook.multimodal.metadata",
    "position_ids": "veomni_hook.multimodal.positions",
}

__all__ = [*_HOME]
__getattr__, __dir__ = imported_on_use(globals(), _HOME)

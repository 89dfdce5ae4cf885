"""Where transformers sets the experts implementation: `veomni_hook.patches.idioms.implementations`."""

from __future__ import annotations

from collections.abc import Iterator

from veomni_hook.patches.idioms.implementations import Setting
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

__all__ = ["CANDIDATES", "OP", "find"]

OP = "moe_experts"
CANDIDATES = "nothing is counted: these are the switches of experts, not experts"

_SETTING = Setting(OP, "experts")


def find(view: ModuleView) -> Iterator[Site]:
    """The config class and the model class of transformers' own modules; nothing elsewhere."""
    yield from _SETTING.sites(view)

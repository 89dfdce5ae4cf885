"""The switch of the mode, for this process."""

from __future__ import annotations

import sys
import warnings
from functools import wraps
from typing import Any

from veomni_hook.errors import VeomniHookWarning

__all__ = ["is_on", "replace_attention", "switch"]

_NAME = "sdpa"

_on = False
_undo: list[Any] = []
_said: set[str] = set()


def is_on() -> bool:
    """Return whether the mode is on in this process."""
    return _on


def switch(*, on: bool) -> None:
    """Switch the mode; nothing happens if it is already so.

    Raises:
        SettingsError: this torch is too old.
    """
    global _on  # noqa: PLW0603
    if on and not _on:
        from veomni_hook.batch_invariance import products  # imports torch

        products.install()
    elif _on and not on:
        from veomni_hook.batch_invariance import products

        products.uninstall()
        while _undo:
            _undo.pop()()
    _on = on
    if on:
        replace_attention()


def replace_attention() -> None:
    """Let transformers call our attention, if its table of implementations is imported; once."""
    if _undo:
        return
    home = sys.modules.get("transformers.modeling_utils")
    table: Any = getattr(home, "ALL_ATTENTION_FUNCTIONS", None)
    if table is None:
        return
    from veomni_hook.batch_invariance.attention import sdpa

    mapping, kind = table._global_mapping, type(table)
    upstream, look_up = mapping[_NAME], kind.get_interface
    mapping[_NAME] = sdpa

    @wraps(look_up)
    def get_interface(self: Any, attn_implementation: Any, default: object) -> Any:
        implementation = look_up(self, attn_implementation, default)
        # Where processes share sequences, what is found is wrapped.
        if self.get(attn_implementation) is not sdpa and str(attn_implementation) not in _said:
            _said.add(str(attn_implementation))
            warnings.warn(
                f"deterministic=batch_invariant: attn_implementation={attn_implementation!r} is not "
                f"batch-invariant. Fix: from_pretrained(..., attn_implementation={_NAME!r}), where the model "
                "has it",
                VeomniHookWarning,
                stacklevel=3,
            )
        return implementation

    kind.get_interface = get_interface
    _undo.extend((lambda: setattr(kind, "get_interface", look_up), lambda: mapping.update({_NAME: upstream})))

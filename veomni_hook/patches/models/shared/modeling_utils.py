"""Around attention, whichever implementation the user chose, and around calls of models.

Over sequences that are split over processes, and in layers that are checkpointed.
"""

# Names of the patched module.
# ruff: noqa: F821
# mypy: disable-error-code="name-defined"

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
config.add_import("veomni_hook.memory.budget", ["keep as veomni_keep_budget"])
config.add_import(
    "veomni_hook.parallel.agreement", ["entered as veomni_entered_call", "left as veomni_left_call"]
)


# The annotations are of builtins: not every release imports more.
def _call_impl(self: object, *args: object, **kwargs: object) -> object:
    veomni_keep_budget(self, args, kwargs)
    call = veomni_entered_call(self, args, kwargs)
    try:
        return super(PreTrainedModel, self)._call_impl(*args, **kwargs)
    finally:
        veomni_left_call(call)


config.add_method(
    "PreTrainedModel._call_impl",
    _call_impl,
    description="a call in training keeps the budget, and processes that share it have the same batch",
)

"""Weights of experts that other processes have are not kept, where ``parallel`` has ``ep`` above 1."""

from __future__ import annotations

from veomni_hook.patches.expert_release import dispatches
from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.core_model_loading",
    description="each process loads its part of the experts",
)

if dispatches():  # and transformers divides experts itself
    config.rewrite(
        "Transpose.convert",
        pattern="{tensor}.shape == {expected}",
        replacement="{tensor}.shape[-2:] == {expected}[-2:]",
        description="a part of the experts has fewer matrices than the parameter, and they stand as it says",
    )
else:
    config.add_import(
        "veomni_hook.parallel.expert_division", ["converted as veomni_converted", "in_turn as veomni_in_turn"]
    )
    config.rewrite(
        "convert_and_load_state_dict_in_model",
        pattern="mapping.convert({name}, **{options})",
        replacement="veomni_converted(mapping, {name}, **{options})",
        description="reads and keeps this process's experts",
    )
    config.rewrite(
        "convert_and_load_state_dict_in_model",
        pattern='is_env_variable_true("HF_DEACTIVATE_ASYNC_LOAD")',
        replacement='(veomni_in_turn(model) or is_env_variable_true("HF_DEACTIVATE_ASYNC_LOAD"))',
        description="no thread reads the experts of other processes in advance",
    )

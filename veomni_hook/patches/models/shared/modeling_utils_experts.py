"""Expert parallelism in unchanged scripts: the ``distributed_config`` that a script did not give."""

from __future__ import annotations

from veomni_hook.patches.expert_release import dispatches
from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.modeling_utils",
    description="experts are divided among processes as the setting `parallel` says",
)

if dispatches():
    config.add_import(
        "veomni_hook.parallel.expert_loading", ["planned as veomni_planned", "settled as veomni_settled"]
    )
    config.rewrite(
        "PreTrainedModel.from_pretrained",
        pattern='kwargs.pop("distributed_config", None)',
        replacement='veomni_settled(cls, kwargs.pop("distributed_config", None), kwargs)',
        description="where the script gave none, the one of the setting",
    )
    config.rewrite(
        "PreTrainedModel.from_pretrained",
        pattern="model._get_dtype_plan({dtype})",
        replacement="veomni_planned(model)._get_dtype_plan({dtype})",
        description="the plan of the model's recognised experts",
    )
else:
    config.add_import(
        "veomni_hook.parallel.expert_loading", ["divided as veomni_divided", "finished as veomni_finished"]
    )
    config.rewrite(
        "PreTrainedModel.from_pretrained",
        pattern="model._get_dtype_plan({dtype})",
        replacement=(
            "veomni_divided(model, (distributed_config, tp_plan, tp_size), device_map, device_mesh)"
            "._get_dtype_plan({dtype})"
        ),
        description="before weights are loaded: this process's part of the experts",
    )
    config.rewrite(
        "PreTrainedModel.from_pretrained",
        pattern="cls._finalize_model_loading({model}, {config}, {told})",
        replacement="veomni_finished({model}, cls._finalize_model_loading({model}, {config}, {told}))",
        description="afterwards: shards and dispatch",
    )

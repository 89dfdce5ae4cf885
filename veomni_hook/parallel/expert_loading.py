"""Expert parallelism in unchanged scripts: what ``from_pretrained`` does under ``VEOMNI_PARALLEL="ep=2"``.

transformers shards experts when a script gives ``from_pretrained`` a ``distributed_config``. The patched
`transformers.modeling_utils` calls `settled` where that argument is read, and `planned` when the model is
built but not yet loaded. In older releases it calls `divided` there instead, and `finished` when the weights
are loaded. Parallelism that the script has set up itself is left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from veomni_hook import releases
from veomni_hook.errors import ParallelError
from veomni_hook.parallel import process
from veomni_hook.parallel.expert_adapters import keep_equal
from veomni_hook.parallel.expert_dispatch import register
from veomni_hook.parallel.expert_plans import MARK, dispatched, ep_size, is_ours, plan_of
from veomni_hook.parallel.expert_replicas import loaded
from veomni_hook.patches import expert_release

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["divided", "finished", "is_ours", "planned", "settled"]


def settled(kind: type, given: object, options: Mapping[str, object]) -> object:
    """Return the ``distributed_config`` with which ``kind.from_pretrained`` goes on.

    Args:
        kind: the model's class.
        given: what the script gave.
        options: the script's other options that `from_pretrained` has not read yet.

    Raises:
        ParallelError: ``ep`` does not divide the processes of the job, or the script uses what expert
            parallelism does not support.
    """
    if getattr(given, "ep_implementation", None) == expert_release.NAME:
        register()  # a script that names our dispatch needs no setting for it
    if not process.asks_for_ep(given, options.get("tp_plan"), options.get("tp_size")):
        return given
    size = process.sizes().ep
    _check(kind, size, options.get("device_mesh"))
    from transformers.distributed import DistributedConfig  # exists from transformers 5.9 on

    register()
    config = DistributedConfig(
        fsdp_size=process.world_size(), ep_size=size, ep_implementation=expert_release.NAME
    )
    setattr(config, MARK, size)
    return config


def planned(model: PreTrainedModel) -> PreTrainedModel:
    """Give the model the plan of its experts, if `settled` made its config; return the model.

    Raises:
        ParallelError: the model has no experts that can be divided, or ``ep`` does not divide their number.
    """
    loaded(model)
    if (size := ep_size(model)) > 1 and is_ours(model):
        model.ep_plan = plan_of(model, size)
        # Before a forward: adapters may be added after the model was loaded.
        model.register_forward_pre_hook(keep_equal)
    return model


def divided(
    model: PreTrainedModel, own: tuple[object, ...], device_map: object, device_mesh: object
) -> PreTrainedModel:
    """Divide the experts of a model that is not loaded yet, if the setting asks for it; return the model.

    For releases that do not divide them so that this package can dispatch.

    Args:
        own: what the script gave for parallelism of its own; None: nothing.
        device_map, device_mesh: the script's.

    Raises:
        ParallelError: as `settled` and `planned`, or transformers is too old.
    """
    loaded(model)
    if not process.asks_for_ep(*own):
        return model
    size = process.sizes().ep
    if not expert_release.divides_experts():
        least = expert_release.LEAST
        raise ParallelError(
            f"ep={size} needs transformers {least} or newer; this is {releases.installed('transformers')}",
            where=process.SETTING,
            fix=f"pip install 'transformers>={least}', or remove ep",
        )
    _check(type(model), size, device_mesh, device_map)
    experts = dispatched(model, plan_of(model, size))
    # Here: only in releases that need it.
    from veomni_hook.parallel.expert_division import begin

    begin(model, experts, size)
    setattr(model, MARK, size)
    model.register_forward_pre_hook(keep_equal)
    return model


def finished(model: PreTrainedModel, told: object) -> object:
    """Shard a model that has got its weights, if `divided` divided it; return ``told``."""
    if is_ours(model):
        from veomni_hook.parallel.expert_division import finish

        finish(model)
    return told


def _check(kind: type, size: int, device_mesh: object, device_map: object = None) -> None:
    if process.world_size() % size:
        raise ParallelError(
            f"ep={size} does not divide the {process.world_size()} processes of this job",
            where=process.SETTING,
            fix=f"start the script with `torchrun --nproc_per_node N` (N: a multiple of {size}), "
            "or choose another ep",
        )
    for refused, fix in _refused(device_mesh, device_map):
        raise ParallelError(
            f"ep={size} does not support {refused}, which this script uses for {kind.__name__}",
            where=process.SETTING,
            fix=fix,
        )


def _refused(device_mesh: object, device_map: object) -> Iterator[tuple[str, str]]:
    """Yield what the script uses and expert parallelism does not support, and what to do."""
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() in ("1", "true"):
        yield "CPU offload (FSDP_OFFLOAD_PARAMS)", "switch the offload off, or remove ep"
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    if deepspeed is not None and deepspeed.is_deepspeed_zero3_enabled():
        yield "DeepSpeed ZeRO-3", "use FSDP2 (the default with ep), or remove ep"
    if device_mesh is not None:
        yield "a device_mesh of the script's own", "pass distributed_config instead, or remove ep"
    if isinstance(device_map, str) or (isinstance(device_map, Mapping) and len(set(device_map.values())) > 1):
        yield f"device_map={device_map!r}", "remove device_map: each process has one device; or remove ep"

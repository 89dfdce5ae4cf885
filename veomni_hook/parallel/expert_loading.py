"""Expert parallelism in unchanged scripts: what ``from_pretrained`` does under ``VEOMNI_PARALLEL="ep=2"``.

transformers shards experts when a script gives ``from_pretrained`` a ``distributed_config``. The patched
`transformers.modeling_utils` calls `settled` where that argument is read, and `planned` when the model is
built but not yet loaded. A config that the script gives itself is left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import distributed

from veomni_hook.errors import ParallelError
from veomni_hook.parallel import expert_release, process
from veomni_hook.parallel.expert_plans import plan_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

__all__ = ["is_ours", "planned", "settled"]

_WHERE = "the setting `parallel` (VEOMNI_PARALLEL)"
_ATTRIBUTE = "_veomni_ep"


def settled(kind: type, given: object, options: Mapping[str, object]) -> object:
    """Return the ``distributed_config`` with which ``kind.from_pretrained`` goes on.

    Args:
        kind: the model's class.
        given: what the script gave.
        options: the script's other options that `from_pretrained` has not read yet.

    Raises:
        ParallelError: transformers is too old, ``ep`` does not divide the processes of the job, or the script
            uses what expert parallelism does not support.
    """
    size = process.sizes().ep
    own = given is not None or options.get("tp_plan") is not None or options.get("tp_size") is not None
    if getattr(given, "ep_implementation", None) == expert_release.NAME and expert_release.dispatches():
        _register()  # a script that names our dispatch needs no setting for it
    if size == 1 or own or _accelerate_splits():
        return given
    _check_release(size)
    world = _world()
    if world % size:
        raise ParallelError(
            f"ep={size} does not divide the {world} processes of this job",
            where=_WHERE,
            fix=f"start the script with `torchrun --nproc_per_node N` (N: a multiple of {size}), "
            "or choose another ep",
        )
    if world == size and not expert_release.dispatches():
        raise ParallelError(
            f"ep={size} on {world} processes needs transformers {expert_release.DISPATCHES}: "
            f"{expert_release.installed()} divides the experts' gradients twice when ep is the whole job",
            where=_WHERE,
            fix=f"pip install 'transformers>={expert_release.DISPATCHES}', or start more processes",
        )
    for refused, fix in _refused(options):
        raise ParallelError(
            f"ep={size} does not support {refused}, which this script uses for {kind.__name__}",
            where=_WHERE,
            fix=fix,
        )
    return _config(world, size)


def planned(model: PreTrainedModel) -> PreTrainedModel:
    """Give the model the plan of its experts, if `settled` made its config; return the model.

    Raises:
        ParallelError: the model has no experts that can be divided, or ``ep`` does not divide their number.
    """
    if is_ours(model):
        model.ep_plan = plan_of(model, model.config.distributed_config.ep_size)
        model.register_forward_pre_hook(_Refusing())
    return model


def is_ours(model: object) -> bool:
    """Whether a model's experts are divided because the setting asked for it."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    return getattr(config, _ATTRIBUTE, False)


class _Refusing:
    """Refuses adapters: they may be added after the model was loaded."""

    def __call__(self, model: object, args: object) -> None:
        if "peft_config" in vars(model) or getattr(model, "_hf_peft_config_loaded", False):
            raise ParallelError(
                "expert parallelism does not support adapters of PEFT, which "
                f"{type(model).__name__} has: their factors would not be divided with the experts",
                where=_WHERE,
                fix="train without ep, or without adapters",
            )


def _config(world: int, size: int) -> DistributedConfig:
    from transformers.distributed import DistributedConfig  # exists from transformers 5.9 on

    options: dict[str, object] = {"fsdp_size": world, "ep_size": size}
    if expert_release.dispatches():
        _register()
        options["ep_implementation"] = expert_release.NAME
    config = DistributedConfig(**options)
    setattr(config, _ATTRIBUTE, True)
    return config


def _register() -> None:
    """Add this package's dispatch to transformers' list."""
    # Imports `transformers.distributed.expert_parallel`, which exists from 5.23 on.
    from veomni_hook.parallel.expert_dispatch import register

    register()


def _check_release(size: int) -> None:
    least = expert_release.LEAST
    if not expert_release.divides_experts():
        raise ParallelError(
            f"ep={size} needs transformers {least} or newer; this is {expert_release.installed()}",
            where=_WHERE,
            fix=f"pip install 'transformers>={least}' (5.23: with this package's dispatch), or remove ep",
        )


def _world() -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _accelerate_splits() -> bool:
    """Whether the script has given accelerate a `ParallelismConfig`."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return getattr(state, "_shared_state", {}).get("parallelism_config") is not None


def _refused(options: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield what the script uses and expert parallelism does not support, and what to do."""
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() in ("1", "true"):
        yield "CPU offload (FSDP_OFFLOAD_PARAMS)", "switch the offload off, or remove ep"
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    if deepspeed is not None and deepspeed.is_deepspeed_zero3_enabled():
        yield "DeepSpeed ZeRO-3", "use FSDP2 (the default with ep), or remove ep"
    if options.get("device_mesh") is not None:
        yield "a device_mesh of the script's own", "pass distributed_config instead, or remove ep"

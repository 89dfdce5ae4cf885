"""Models with whole experts under a setting that divides experts: built from a config, not loaded.

Their replicas would be trained apart from each other in silence. The patched `transformers.modeling_utils`
calls `built` where a model has got its modules, and `expert_loading` calls `loaded`.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from veomni_hook.errors import ParallelError, VeomniHookWarning
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing, variable
from veomni_hook.parallel import process
from veomni_hook.parallel.expert_plans import experts_of

__all__ = ["built", "loaded"]


def built(model: nn.Module) -> nn.Module:
    """Let a model that has experts of its own check who synchronises its replicas; return it.

    Experts of models in it are theirs.
    """
    if process.sizes().ep > 1:
        from transformers import PreTrainedModel  # calls this, so it is imported

        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        inner = {part for other in models if other is not model for part in other.modules()}
        if any(module not in inner for _, module in experts_of(model)):
            model.register_forward_pre_hook(_check_replica)
    return model


def loaded(model: nn.Module) -> None:
    """Leave a model to `from_pretrained`, which divides it, or to what the script told it."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _check_replica]:
            del hooks[key]


def _check_replica(model: nn.Module, args: object) -> None:
    """Before a forward that trains: raises if nobody synchronises a model's replicas, else warns once."""
    if not (torch.is_grad_enabled() and model.training):
        return
    if is_dynamo_compiling():
        _check_while_tracing()
    elif _check(model):
        loaded(model)


@answered_while_tracing
def _check_while_tracing() -> bool:
    return _check(variable("model").value)


def _check(model: nn.Module) -> bool:
    """Return whether a model of several processes trains, with replicas that the script synchronises.

    Raises:
        ParallelError: nobody synchronises them.
    """
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if not trained or not process.asks_for_ep() or process.world_size() == 1:
        return False
    name, size = type(model).__name__, process.sizes().ep
    what = f"ep={size} does not divide the experts of {name}: it was built from a config"
    if not _synchronised(model):
        raise ParallelError(
            f"{what}, and each of {process.world_size()} processes would train a copy of its own",
            where=f"{name}.forward",
            fix="save it once with save_pretrained and load it with from_pretrained, or remove ep "
            "(VEOMNI_PARALLEL) and wrap it in DistributedDataParallel or FSDP2",
        )
    warnings.warn(
        f"{what}, so it trains as the script has wrapped it. To divide them, load it with from_pretrained",
        VeomniHookWarning,
        stacklevel=4,
    )
    return True


def _synchronised(model: nn.Module) -> bool:
    """Whether the script lets DDP, FSDP, DeepSpeed or tensors of several processes synchronise a model."""
    communication = getattr(sys.modules.get("deepspeed"), "comm", None)
    own = set(model.modules())
    return (
        DistributedDataParallel._get_active_ddp_module() is not None  # type: ignore[no-untyped-call]
        # A unit of FSDP2 is in the model, or the model is in one.
        or any(unit in own or model in unit.modules() for unit in [*_module_state_mapping])
        # FSDP1 puts views of its flat parameters into a forward.
        or any(isinstance(each, DTensor) or not each.is_leaf for each in model.parameters())
        or (communication is not None and communication.is_initialized())
    )

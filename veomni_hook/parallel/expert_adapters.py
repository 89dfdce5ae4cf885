"""Adapters of PEFT on a model whose experts are divided: replicas that are kept equal.

An adapter is added when the model is sharded already, so its factors are whole tensors in every process, and
FSDP2 does not know them. As under DDP, they start as those of rank 0, and their gradients are averaged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn

from veomni_hook.errors import ParallelError
from veomni_hook.parallel import process
from veomni_hook.parallel.expert_plans import experts_of

__all__ = ["has_adapters", "keep_equal"]

_ATTRIBUTE = "_veomni_averaged"


def has_adapters(model: object) -> bool:
    """Whether PEFT has added adapters to a model."""
    return hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)


def keep_equal(model: nn.Module, args: object) -> None:
    """Keep adapters of a divided model equal: a hook before its forward.

    Raises:
        ParallelError: adapters are of experts.
    """
    if not has_adapters(model):
        return
    for parameter in _factors(model):
        if torch.is_grad_enabled() and parameter.requires_grad and not hasattr(parameter, _ATTRIBUTE):
            with torch.no_grad():
                distributed.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(_average)  # type: ignore[no-untyped-call]
            setattr(parameter, _ATTRIBUTE, True)


def _average(parameter: Tensor) -> None:
    """Average a gradient over all ranks; what earlier passes have left in it is equal on all of them."""
    if parameter.grad is not None:
        distributed.all_reduce(parameter.grad)
        parameter.grad /= distributed.get_world_size()


def _factors(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that adapters have added.

    Raises:
        ParallelError: they are of experts.
    """
    peft: Any = sys.modules["peft.tuners.tuners_utils"]
    experts = {id(module) for _, module in experts_of(model)}
    for name, module in model.named_modules():
        if not isinstance(module, peft.BaseTunerLayer):
            continue
        if id(module.get_base_layer()) in experts:
            raise ParallelError(
                f"expert parallelism does not support adapters of PEFT on experts ({name} of "
                f"{type(model).__name__}): their factors would not be divided with the experts",
                where=process.SETTING,
                fix="adapt other modules (target_modules, without target_parameters), or train without ep",
            )
        for key, parameter in module.named_parameters():
            if not key.startswith("base_layer."):
                yield parameter

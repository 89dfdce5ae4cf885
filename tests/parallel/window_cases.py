"""FSDP2 around layers that pool windows of positions, where a process has no window that is full."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.parallel import small
from tests.veomni.configurations import CONFIGURATIONS, VOCABULARY

_, _, SIZES = CONFIGURATIONS["deepseek_v4"]


def made() -> Any:
    """Return a model, the same in every process."""
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**SIZES)).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.2)
    return model


def gradients(model: Any, lengths: list[int], *, use_cache: bool = False) -> dict[str, torch.Tensor]:
    """Return the gradients of a row of samples."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model(input_ids=ids, position_ids=positions, labels=ids, use_cache=use_cache).loss.backward()
    return {
        name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def facts(lengths: list[list[int]], unit: str = "", *, use_cache: bool = False) -> dict[str, Any]:
    """Return how far gradients are from the mean of what one process computes of the samples of all.

    Args:
        lengths: of the samples in the row of each process.
        unit: the attribute of attention that is a unit by itself, or empty.
        use_cache: whether the model makes a cache.
    """
    model = made()
    alone = [gradients(copy.deepcopy(model), row) for row in lengths]
    names = {name for each in alone for name in each}
    means = {name: sum(each[name] for each in alone if name in each) / len(lengths) for name in names}
    for layer in model.model.layers:
        if (part := getattr(layer.self_attn, unit, None)) is not None:
            fully_shard(part)
        fully_shard(layer)
    fully_shard(model)
    found = gradients(model, lengths[distributed.get_rank()], use_cache=use_cache)
    return {"worst": small.worst(found, means)[0], "pooled": sum("compressor" in name for name in found)}

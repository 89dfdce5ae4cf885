"""FSDP2 around the fused loss: heads in units of all kinds, frozen parts, ranks without labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.parallel import small
from veomni_hook.kernels.float8.layers import adapt
from veomni_hook.kernels.float8.setting import Precision
from veomni_hook.kernels.linear_cross_entropy.output import LazyLogits
from veomni_hook.kernels.selection.process_choice import set_choice

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(arrangement: str) -> Any:
    """Return a model whose head is sharded in some way."""
    model = small.model("llama", tie_word_embeddings=arrangement == "tied")
    if arrangement == "frozen head":
        model.lm_head.requires_grad_(False)
    if arrangement == "frozen layers":
        model.model.layers.requires_grad_(False)
    policy = HALF if arrangement == "float32 head" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    if arrangement in ("alone", "frozen head"):
        fully_shard(model.lm_head)
    if arrangement in ("with the norm", "with the norm, kept"):
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=arrangement == "with the norm")
    if arrangement == "float32 head":
        fully_shard(model.lm_head, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    return fully_shard(model, mp_policy=policy)


def trained(arrangement: str, kernels: str) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Return losses and parameters of some steps, and whether the loss was fused."""
    set_choice(kernels)
    model = sharded(arrangement)
    if arrangement == "checkpoints":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    adam = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3, eps=1e-3)
    losses, fused = [], True
    for step in range(3):
        batch: dict[str, Any] = small.batch("padded", 12 + 2 * step + distributed.get_rank())
        if arrangement == "a rank without labels" and distributed.get_rank() == 1:
            batch["labels"] = torch.full_like(batch["labels"], -100)
        adam.zero_grad()
        output = model(**batch, num_items_in_batch=20, use_cache=False)
        fused = fused and isinstance(output, LazyLogits)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        losses.append(output.loss.item())
    parameters = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach()
        for name, each in model.named_parameters()
    }
    return losses, parameters, fused


def facts(arrangement: str) -> dict[str, Any]:
    """Return how far training with the fused loss is from training without."""
    losses, expected, _ = trained(arrangement, "eager")
    ours, found, fused = trained(arrangement, "torch")
    return {
        "fused": fused,
        "losses": max(abs(a - b) for a, b in zip(ours, losses, strict=True)),
        "parameters": small.worst(found, expected)[0],
    }


def in_float8(arrangement: str) -> dict[str, Any]:
    """Return how far training with layers in float8 is from copies of the model in all processes.

    Of these, gradients are averaged by hand. Arrangements: ``fsdp``, ``ddp``; with ``checkpoints``.
    """
    set_choice("torch")
    sides = []
    for divided in (False, True):
        model = adapt(small.model("llama", intermediate_size=48), Precision("float8"))
        if "checkpoints" in arrangement:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        forward = model
        if divided and "ddp" in arrangement:
            forward = torch.nn.parallel.DistributedDataParallel(model)
        elif divided:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        losses = []
        for step in range(3):
            adam.zero_grad()
            output = forward(**small.batch("padded", 12 + 2 * step + distributed.get_rank()), use_cache=False)
            output.loss.backward()
            for parameter in () if divided else model.parameters():
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()
            adam.step()
            losses.append(output.loss.item())
        ran = [module.plain_because for module in model.modules() if hasattr(module, "plain_because")]
        whole = {name: getattr(w, "full_tensor", lambda w=w: w)() for name, w in model.named_parameters()}
        sides.append((losses, {name: weight.detach() for name, weight in whole.items()}, ran))
    (losses, expected, _), (ours, found, ran) = sides
    return {
        "ran": ran,
        "losses": max(abs(a - b) for a, b in zip(ours, losses, strict=True)),
        "parameters": small.worst(found, expected)[0],
    }

"""Two processes train small models with DDP and FSDP2: how far gradients are from those of one process."""

from __future__ import annotations

import json

import torch
from torch import distributed

from tests.memory.facts_of_models import EXPERTS, SMALL


def model_of(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = SMALL | (EXPERTS if name == "qwen3_moe" else {}) | {"output_router_logits": False}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields)).train()


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def off(model, expected):
    gradients = {name: p.grad for name, p in model.named_parameters()}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}
    return max(((whole[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)


def main():
    import veomni_hook.install  # noqa: F401
    from veomni_hook.memory import heads, host, offload, parts, tiles

    host.BLOCK = offload.BLOCK = 4096
    offload.LEAST = tiles.LEAST = tiles.MULTIPLE = 1
    heads.ROWS = tiles.MOST = 16
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    ids = torch.randint(1, 96, (4, 24), generator=torch.Generator().manual_seed(1))
    own = ids[2 * rank : 2 * rank + 2]
    found = {}
    for name in ("llama", "qwen3_moe"):
        model = model_of(name)
        model.gradient_checkpointing_disable()
        with parts.using(parts.Parts()):
            model(input_ids=ids, labels=ids).loss.backward()
        expected = {n: p.grad for n, p in model.named_parameters()}
        for kind, wrap in (("DDP", torch.nn.parallel.DistributedDataParallel), ("FSDP2", sharded)):
            model = model_of(name)
            wrapped = wrap(model)
            for _ in "12":
                model.zero_grad()
                wrapped(input_ids=own, labels=own).loss.backward()
            found[f"{name} with {kind}"] = off(model, expected)
    if rank == 0:
        print(json.dumps({"off": found, "blocks": host.BLOCKS.held}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Two processes train small models with DDP and FSDP2: how far gradients are from those of one process.

The settings are the environment's. Processes that share sequences have the same batch, others have their own.
"""

import json
import os

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.memory.facts_of_models import NOTED, batches_of, make_small, model_of
from tests.processes import leave

#: By the setting `parallel`. Heads are exchanged; keys go around a ring; processes share images.
CASES = {
    "": {"llama": ("llama", {}), "qwen3_moe": ("qwen3_moe", {"output_router_logits": False})},
    "sp=2": {
        "llama": ("llama", {}),
        "ring": ("llama", {"num_key_value_heads": 1}),
        "qwen3_vl": ("qwen3_vl", {}),
    },
}


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.get_decoder().layers:
        fully_shard(layer)
    return fully_shard(model)


def off(model, expected):
    gradients = {name: p.grad for name, p in model.named_parameters()}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}
    return max(((whole[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)


def gradients_of(model, batches):
    """Those of one process without the settings."""
    from veomni_hook.memory import parts
    from veomni_hook.parallel import process

    sizes = str(process.sizes())
    model.gradient_checkpointing_disable()
    process.tell("")
    with parts.using(parts.Parts()):
        for batch in batches:
            model(**batch).loss.backward()
    process.tell("" if sizes == "none" else sizes)
    return {name: p.grad for name, p in model.named_parameters()}


def checkpointed(model):
    return sum(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def trained(wrapped, batches):
    for _ in "12":
        wrapped.zero_grad()
        for batch in batches:
            wrapped(**batch).loss.backward()


def with_a_budget():
    """Train with DDP and a budget that is too little for the batch of one process; tell of each."""
    from veomni_hook.memory import budget, parts
    from veomni_hook.memory.prediction import predict

    parts.tell("")
    model, rank = model_of("llama"), distributed.get_rank()
    shapes = ((2, 48), (1, 4))
    batches = [{"input_ids": ids, "labels": ids} for ids in (torch.ones(shape).long() for shape in shapes)]
    most = 0.9 * max(predict(model, batch).peak for batch in batches)
    expected = gradients_of(model_of("llama"), batches[rank : rank + 1])
    for gradient in expected.values():
        distributed.all_reduce(gradient)
        gradient /= 2
    parts.tell(f"{int(most / budget.SHARE)}B")
    # As Trainer does where no layers are checkpointed.
    trained(DistributedDataParallel(model, find_unused_parameters=True), batches[rank : rank + 1])
    told = [None, None]
    distributed.all_gather_object(told, {"checkpointed": checkpointed(model), "off": off(model, expected)})
    return told


def main():
    import veomni_hook.install  # noqa: F401
    from veomni_hook.memory import host
    from veomni_hook.parallel import attention

    make_small()
    around = attention.ring_attention

    def ring_attention(*operands, **named):
        NOTED["ring"] += 1
        return around(*operands, **named)

    attention.ring_attention = ring_attention
    distributed.init_process_group("gloo")
    rank, parallel = distributed.get_rank(), os.environ.get("VEOMNI_PARALLEL", "")
    found = {}
    for case, (name, changes) in CASES[parallel].items():
        for kind, wrap in (("DDP", DistributedDataParallel), ("FSDP2", sharded)):
            model = model_of(name, **changes)
            batches = batches_of(name, model)
            if not parallel:
                generator = torch.Generator().manual_seed(1)
                ids = torch.randint(1, 96, (4, 24), generator=generator)
                batches = [{"input_ids": ids, "labels": ids}]
            expected = gradients_of(model_of(name, **changes), batches)
            own = batches if parallel else [{n: x[2 * rank :][:2] for n, x in batches[0].items()}]
            NOTED.clear()
            trained(wrap(model), own)
            found[f"{case} with {kind}"] = {
                "off": off(model, expected),
                "checkpointed": checkpointed(model),
                "parts": sorted(NOTED),
                "blocks": host.BLOCKS.held,
            }
            host.BLOCKS.release()
    told = None if parallel else with_a_budget()
    if rank == 0:
        print(json.dumps({"found": found, "budget": told}))
    leave()


if __name__ == "__main__":
    main()

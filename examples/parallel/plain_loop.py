"""A plain training loop over long sequences, without Trainer or accelerate.

    VEOMNI_PARALLEL=sp=2 torchrun --nproc_per_node 2 plain_loop.py

With one process, or without VEOMNI_PARALLEL, it is ordinary data parallelism. One line differs: the sampler
asks which share of the data this process reads.
"""

import argparse
import json

import veomni_hook.install
import veomni_hook.parallel

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, LlamaConfig


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=127)
    parser.add_argument("--output", help="rank 0 writes the losses to this file")
    return parser.parse_args()


def main():
    arguments = parsed()
    gpu = torch.cuda.is_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    mesh = init_device_mesh(device.type, (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = torch.randint(0, 256, (64, arguments.length), generator=torch.Generator().manual_seed(1))
    # The line that knows of us: processes that share a sequence read the same batches.
    index, count = veomni_hook.parallel.data_shard()
    sampler = DistributedSampler(data, num_replicas=count, rank=index, shuffle=False)

    losses = []
    for _, ids in zip(range(arguments.steps), DataLoader(data, batch_size=2, sampler=sampler), strict=False):
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if rank == 0:
        print("losses:", *(f"{loss:.5f}" for loss in losses))
        if arguments.output:
            with open(arguments.output, "w", encoding="utf-8") as file:
                json.dump(losses, file)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

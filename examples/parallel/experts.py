"""A plain training loop whose model has its experts on several processes.

    VEOMNI_PARALLEL=ep=2 torchrun --nproc_per_node 2 experts.py

`from_pretrained` divides the model: experts by the setting, everything else by FSDP2. Each process reads its
own batches. With one process it is an ordinary loop. Needs transformers 5.9 or newer.
"""

import argparse
import json
import tempfile

import veomni_hook.install
import veomni_hook.parallel

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, Qwen3MoeConfig


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--output", help="rank 0 writes the losses to this file, means over the processes")
    return parser.parse_args()


def checkpoint(folder, rank):
    """Write a small model with random weights: a real script names a checkpoint."""
    if rank == 0:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_experts=8,
            num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    distributed.barrier()


def main():
    arguments = parsed()
    gpu = torch.cuda.is_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    checkpoint(folder[0], rank)

    model = AutoModelForCausalLM.from_pretrained(folder[0]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(0, 256, (64, arguments.length), generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(arguments.steps):
        # A step's four rows, divided among the processes.
        ids = data[4 * step : 4 * step + 4].chunk(world)[rank].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        veomni_hook.parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / world)
    if rank == 0:
        print("losses:", *(f"{loss:.5f}" for loss in losses))
        if arguments.output:
            with open(arguments.output, "w", encoding="utf-8") as file:
                json.dump(losses, file)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

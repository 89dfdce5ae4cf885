"""A loop with accelerate over long sequences that processes share.

    VEOMNI_PARALLEL=sp=2 torchrun --nproc_per_node 2 accelerate_loop.py

Nothing in it knows of sequence parallelism: `Accelerator.prepare` gives the processes that share a sequence
the same batches. With one process, or without VEOMNI_PARALLEL, it is ordinary data parallelism.
"""

import argparse
import json

import veomni_hook.install

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=127)
    parser.add_argument("--output", help="rank 0 writes the losses to this file")
    return parser.parse_args()


def main():
    arguments = parsed()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(0, 256, (64, arguments.length), generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))

    losses = []
    for _, ids in zip(range(arguments.steps), loader, strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if accelerator.is_main_process:
        print("losses:", *(f"{loss:.5f}" for loss in losses))
        if arguments.output:
            with open(arguments.output, "w", encoding="utf-8") as file:
                json.dump(losses, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()

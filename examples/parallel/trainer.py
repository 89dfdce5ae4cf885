"""transformers' Trainer over long sequences that processes share.

    VEOMNI_PARALLEL=sp=2 torchrun --nproc_per_node 2 trainer.py

Nothing in it knows of sequence parallelism: Trainer's loaders give the processes that share a sequence the
same batches. With one process, or without VEOMNI_PARALLEL, it is ordinary data parallelism.
"""

import argparse
import json
import tempfile

import veomni_hook.install

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=127)
    parser.add_argument("--output", help="rank 0 writes the losses to this file")
    return parser.parse_args()


def main():
    arguments = parsed()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.randint(0, 256, (64, arguments.length), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            AutoModelForCausalLM.from_config(config),
            TrainingArguments(
                folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=2,
                learning_rate=1e-3,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                ddp_find_unused_parameters=False,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print("losses:", *(f"{loss:.5f}" for loss in losses))
        if arguments.output:
            with open(arguments.output, "w", encoding="utf-8") as file:
                json.dump(losses, file)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

"""Run by torchrun: log-probabilities of a batch that the processes share, saved by the first one.

Arguments: the file to save to.
"""

import sys

import torch
import torch.distributed as dist

import veomni_hook

if __name__ == "__main__":
    with veomni_hook.activate(deterministic="batch_invariant"):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        ids = torch.randint(1, 512, (2, 90))
        with veomni_hook.loss_options(token_outputs=("log_probs",)):
            found = model(ids, labels=ids, use_cache=False)
        if dist.get_rank() == 0:
            torch.save(found.log_probs.detach(), sys.argv[1])
        dist.barrier()
        dist.destroy_process_group()

"""A process that trains small models two steps: `python -m tests.memory.facts_of_models [checkpointed]`.

Printed of each, as JSON: the loss, a digest of all gradients, their norms, and how many layers are
checkpointed. The setting is the environment's; ``checkpointed``: the script enables checkpoints itself.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
CHECKPOINTED = "checkpointed"
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "output_router_logits": True,
}
#: Norms behind the MLP; experts; layers in a list of their own function; dropout.
MODELS = {
    "llama": {},
    "gemma2": {"sliding_window": 8},
    "qwen3_moe": EXPERTS,
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 96,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    "llama with LoRA": {},
}


def model_of(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, _, adapters = name.partition(" with ")
    fields = MODELS[name] if kind == "gpt2" else SMALL | MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    if adapters:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
    if CHECKPOINTED in sys.argv:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def facts(model):
    ids = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    torch.manual_seed(2)
    output = model(input_ids=ids, attention_mask=mask, labels=ids)
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    digest = hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in grads.values())).hexdigest()
    embedded = model.get_input_embeddings()(ids)
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    return {
        "loss": output.loss.item(),
        "digest": digest,
        "norms": {name: grad.norm().item() for name, grad in grads.items()},
        "checkpointed": len(layers),
        "leaf": embedded.requires_grad and embedded.is_leaf,
    }


def main():
    import veomni_hook.install  # noqa: F401
    from veomni_hook.memory import heads, host, offload, tiles

    host.BLOCK = offload.BLOCK = 4096
    offload.LEAST = tiles.LEAST = tiles.MULTIPLE = 1
    heads.ROWS = tiles.MOST = 16
    found = {name: facts(model_of(name)) for name in MODELS}
    print(json.dumps(found | {"blocks": host.BLOCKS.held}))


if __name__ == "__main__":
    main()

"""A process that trains small models with the hook: `python -m tests.kernels.float8.facts_of_models`.

Printed as JSON: which modules are in float8, what `explain` says, losses, and what came of a deactivation. The
setting is the environment's.
"""

from __future__ import annotations

import copy
import json

import torch

import veomni_hook

HANDLE = veomni_hook.activate(banner=False)

import peft  # noqa: E402 - behind the activation, as in a script
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.arange(1, 65).reshape(2, 32)


def in_float8(model):
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def loss_of(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item()


def main():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    told = {"modules": in_float8(model), "loss": loss_of(model)}
    told["notes"] = [
        line.strip() for line in str(veomni_hook.explain(model)).splitlines() if "precision" in line
    ]
    model.gradient_checkpointing_enable()
    told["checkpointed"] = loss_of(model)
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules="all-linear", r=16))
    told["adapted"] = [in_float8(adapted), loss_of(adapted)]
    told["trained"] = sorted({n.split(".")[-3] for n, w in adapted.named_parameters() if w.grad is not None})
    told["ran"] = sorted(
        {row.backend for row in veomni_hook.explain(adapted).rows if row.op == "low_rank_linear"}
    )
    if told["modules"]:
        told["compiled"] = loss_of(torch.compile(copy.deepcopy(model), backend="aot_eager"))
    HANDLE.deactivate()
    told["deactivated"] = loss_of(model)
    told["later"] = in_float8(LlamaForCausalLM(LlamaConfig(**SIZES)))
    print(json.dumps(told))


if __name__ == "__main__":
    main()

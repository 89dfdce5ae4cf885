"""A process that trains small models with the hook: `python -m tests.kernels.float8.facts_of_models`.

Printed as JSON: which modules are in float8, what `explain` says, losses, and what came of a deactivation. The
setting is the environment's.
"""

import copy
import json
import os

import torch

import veomni_hook

HANDLE = veomni_hook.activate(banner=False)

import peft  # noqa: E402 - behind the activation, as in a script
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.arange(1, 65).reshape(2, 32)
FORMAT = os.environ["VEOMNI_PRECISION"] or "float8"


CLASSES = ("Float8Linear", "MXLinear")


def in_float8(model):
    return [name for name, module in model.named_modules() if type(module).__name__ in CLASSES]


def loss_of(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item()


def notes(model):
    return [line.strip() for line in str(veomni_hook.explain(model)).splitlines() if "precision" in line]


def ran(model):
    return sorted({row.backend for row in veomni_hook.explain(model).rows if row.op == "moe_experts"})


def of_experts():
    """What is told of a model with experts in its second layer."""

    def made(**changes):
        torch.manual_seed(0)
        more = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        config = Qwen3MoeConfig(**SIZES, **more, head_dim=16, mlp_only_layers=[0])
        return Qwen3MoeForCausalLM._from_config(config, **changes).train()

    model = made()
    told = {"loss": loss_of(model), "ran": ran(model), "notes": notes(model)}
    copied = copy.deepcopy(model)
    told["copied"] = [loss_of(copied), ran(copied)]
    if told["notes"]:
        told["compiled"] = loss_of(torch.compile(copy.deepcopy(model), backend="aot_eager"))
    veomni_hook.bind(model, precision=f"{FORMAT},skip=experts")
    told["left out"] = [loss_of(model), ran(model), notes(model)]
    veomni_hook.bind(model, precision="none")
    told["none"] = [loss_of(model), ran(model)]
    veomni_hook.bind(model, moe_experts="torch", precision=FORMAT)
    told["bound"] = [loss_of(model), ran(model), notes(model)]
    chosen = made(experts_implementation="grouped_mm")
    veomni_hook.bind(chosen, precision=FORMAT)
    told["chosen"] = [loss_of(chosen), ran(chosen), notes(chosen)]
    model = made()
    adapters = peft.LoraConfig(target_parameters=["experts.down_proj"], target_modules=[], r=16)
    adapted = peft.get_peft_model(model, adapters)
    told["adapted"] = [loss_of(adapted), ran(adapted), "adapter fused" in str(veomni_hook.explain(adapted))]
    told["trained"] = sorted({n.split(".")[-3] for n, w in adapted.named_parameters() if w.grad is not None})
    model = made()
    model.gradient_checkpointing_enable()
    told["checkpointed"] = loss_of(model)
    return told


def main():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    told = {"modules": in_float8(model), "loss": loss_of(model)}
    told["notes"] = notes(model)
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
    told["experts"] = of_experts()
    HANDLE.deactivate()
    told["deactivated"] = loss_of(model)
    told["later"] = in_float8(LlamaForCausalLM(LlamaConfig(**SIZES)))
    print(json.dumps(told))


if __name__ == "__main__":
    main()

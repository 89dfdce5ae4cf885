"""One rank of `test_two_ranks`: a step of LoRA on experts under FSDP2, compared with upstream's in one process."""

from __future__ import annotations

import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.kernels.matching import close, grads_of
from tests.kernels.patched_qwen3 import load
from tests.processes import join, leave
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.tools.report.explanation import explain

WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def adapted(home):
    torch.manual_seed(0)
    model = home.Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=WEIGHTS))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def step(model):
    ids = torch.arange(24).view(2, 12)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def experts(model):
    return [layer.mlp.experts for layer in model.base_model.model.model.layers]


def compare(upstream, model, told) -> None:
    close(step(model), step(upstream), 1e-5)
    found = grads_of(model)
    assert len(found) == 2 * 2 * len(WEIGHTS)
    assert all(isinstance(gradient, DTensor) for gradient in found.values())
    close({name: each.full_tensor() for name, each in found.items()}, grads_of(upstream), 1e-4)
    (line,) = (each for each in str(explain(model)).splitlines() if "moe_experts/" in each)
    assert told in line, line


def main() -> None:
    set_choice("eager,moe_experts=torch")
    patched = load(join() / str(dist.get_rank()), modeling_qwen3_moe.__name__)
    # Layers are gathered before they run, so that weights and factors are plain tensors.
    model = adapted(patched)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    compare(adapted(modeling_qwen3_moe), model, "adapter fused (down_proj, gate_up_proj)")
    leave()


if __name__ == "__main__":
    main()

"""LoRA on experts' stacked weights: what the kernels get is a sum of two tensors, made anew at every access."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.kernels.matching import close
from tests.kernels.patched_qwen3 import load
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.report.explanation import explain

peft = pytest.importorskip("peft")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Grouped products of a GPU are in bfloat16.
GROUPED = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# Of the loss, and of a gradient.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 4e-2)}
WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

pytestmark = pytest.mark.usefixtures("anywhere")


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    patched = load(tmp_path_factory.mktemp("patched"), modeling_qwen3_moe.__name__)
    return modeling_qwen3_moe, patched


def adapted(home):
    torch.manual_seed(0)
    model = home.Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(DEVICE)
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=WEIGHTS))
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # B is zeros before
    return found


def step(model):
    ids = torch.arange(24, device=DEVICE).view(2, 12)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_loss_and_gradients_of_the_adapters_are_upstreams(homes, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    set_choice(f"eager,moe_experts={backend}")
    dtype = GROUPED if backend == "torch" else torch.float32
    upstream, model = (adapted(home).to(dtype) for home in homes)
    (expected, gradients), (loss, found) = step(upstream), step(model)
    of_loss, of_gradients = TOLERANCES[dtype]
    close(loss, expected, of_loss)
    assert set(found) == set(gradients) and len(found) == 2 * 2 * len(WEIGHTS)
    for name, gradient in gradients.items():
        assert "lora" in name and gradient.abs().max() > 0
        close(found[name], gradient, of_gradients)
    (line,) = (each for each in str(explain(model)).splitlines() if "moe_experts" in each)
    assert f": {backend} (chosen), " in line


def test_merged_adapters_compute_the_same(homes):
    set_choice("eager,moe_experts=torch")
    model = adapted(homes[1]).to(GROUPED).eval()
    ids = torch.arange(12, device=DEVICE).view(1, 12)
    with torch.no_grad():
        before = model(ids).logits
        close(model.merge_and_unload()(ids).logits, before, TOLERANCES[GROUPED][1])

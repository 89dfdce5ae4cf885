"""Whole models trained through the backend `npu` on the double: the losses are upstream's."""

import importlib

import pytest
import torch

from tests.kernels import patched_qwen3
from tests.kernels.patched_qwen3 import load
from tests.processes import facts, started
from veomni_hook.finders.prepare import prepare
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.settings import resolve
from veomni_hook.tools.report.explanation import explain

SIZES = {**patched_qwen3.SIZES, "pad_token_id": 0, "tie_word_embeddings": False}
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "output_router_logits": True,
}  # fmt: skip
#: By model: its classes, sizes of its own, and the sites that it has to have on the device.
MODELS = {
    "qwen3": (
        "Qwen3Config", "Qwen3ForCausalLM", {},
        {"rms_norm", "add_rms_norm", "rotary", "gated_mlp", "linear_cross_entropy"},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS,
        {"rms_norm", "add_rms_norm", "rotary", "moe_experts", "moe_router", "load_balancing_loss",
         "linear_cross_entropy"},
    ),
}  # fmt: skip
STEPS = 20


def models(family, folder):
    """An upstream model and a patched one with the same weights."""
    config, kind, further, _ = MODELS[family]
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    made = getattr(configs, config)(**SIZES | further)
    torch.manual_seed(0)
    upstream = getattr(home, kind)(made).train()
    patched = getattr(load(folder, home.__name__), kind)(made).train()
    patched.load_state_dict(upstream.state_dict())
    return upstream, patched


def train(model):
    """The loss of every step."""
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(0, SIZES["vocab_size"], (2, 12), generator=generator)
        labels = ids.clone()
        labels[:, :3] = -100
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.sample(1)
@pytest.mark.parametrize("choice", ["auto", "npu"])
@pytest.mark.parametrize("family", MODELS)
def test_losses_are_upstreams(family, choice, tmp_path_factory, on_ascend, called):
    upstream, patched = models(family, tmp_path_factory.mktemp(family))
    expected = train(upstream)
    set_choice(choice)
    losses = train(patched)
    torch.testing.assert_close(losses, expected, rtol=2e-5, atol=0)
    wanted = MODELS[family][-1]
    ran = {row.op for row in explain(patched).rows if row.backend == "npu"}
    # Without the hook a default of transformers counts as a user's choice, which wins over auto.
    left = {"load_balancing_loss", "moe_experts"} if choice == "auto" else set()
    assert ran | left == wanted | left
    assert {row.backend for row in explain(patched).rows if row.op in wanted} <= (
        {"npu", "torch", "eager"} if left else {"npu"}
    )
    assert {"npu_rms_norm", "npu_rotary_mul", "npu_cross_entropy_loss"} < set(called)


@pytest.mark.slow
def test_under_the_hook_auto_takes_experts_too(tmp_path):
    """There a default of transformers is no choice."""
    found = facts(started("-m", "tests.ascend.facts_of_hooked_experts", cache=tmp_path))
    torch.testing.assert_close(
        torch.tensor(found["losses"]), torch.tensor(found["expected"]), rtol=2e-5, atol=0
    )
    assert {"moe_experts: npu", "moe_router: npu", "rms_norm: npu", "rotary: npu"} <= set(found["ran"])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3", "deepseek_v3"])
def test_the_source_is_that_of_a_gpu(family):
    """No built-in config and no idiom knows of a device."""
    settings = resolve().settings
    module = f"transformers.models.{family}.modeling_{family}"
    gpu, npu = (prepare(module, settings, device=device, publish=False) for device in ("gpu", "npu"))
    assert gpu.patched.text == npu.patched.text and "veomni_" in gpu.patched.text

"""Latent attention of models: the hook's results and gradients are upstream's."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from tests.kernels.matching import DEVICE
from veomni_hook.kernels.head_parts import triton as kernels
from veomni_hook.kernels.selection.process_choice import set_choice

FIELDS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "vocab_size": 50,
    "pad_token_id": None, "attention_dropout": 0.0,
}  # fmt: skip


def attention(module, prefix, implementation):
    config = getattr(module, f"{prefix}Config")(**FIELDS, attn_implementation=implementation)
    torch.manual_seed(0)
    made = getattr(module, f"{prefix}Attention")(config, layer_idx=0).to(DEVICE)
    return made, getattr(module, f"{prefix}RotaryEmbedding")(config).to(DEVICE)


def results(module, prefix, implementation, *, again=False):
    made, rotary = attention(module, prefix, implementation)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    tables = rotary(x, torch.arange(6, device=DEVICE)[None])

    def run(x):
        return made(x, position_embeddings=tables, attention_mask=None)[0]

    y = checkpoint(run, x, use_reentrant=False) if again else run(x)
    y.square().sum().backward()
    return made, [y.detach(), x.grad, *(parameter.grad for parameter in made.parameters())]


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["deepseek_v3:DeepseekV3", "minicpm3:MiniCPM3"])
def test_attention_is_upstreams(modules, anywhere, monkeypatch, family, implementation, again):
    if family.startswith("minicpm3"):
        pytest.importorskip("transformers.models.minicpm3")
    monkeypatch.setattr(kernels, "_FEWEST", 0)
    set_choice("eager,head_parts=triton")
    folder, prefix = family.split(":")
    upstream, patched = modules(folder)
    _, expected = results(upstream, prefix, implementation)
    ours, found = results(patched, prefix, implementation, again=again)
    for variant in ("split", "joined"):
        slot = getattr(patched, f"veomni_head_parts_{variant}")
        assert slot.outcome(ours).backend == "triton"
    # A product of other strides may sum in another order.
    tolerance = {"eager": 1e-6, "sdpa": 0.0}[implementation]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance * float(other.abs().max()))


def test_autograd_keeps_neither_heads_nor_parts():
    x = torch.randn(2, 5, 3, 6, device=DEVICE, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        parts = kernels.split(x.transpose(1, 2), [4, 2], -1, torch.split)
        y = kernels.joined(parts, -1, torch.cat)
    assert y.requires_grad and not kept


def test_few_numbers_are_left_to_torch(monkeypatch):
    x = torch.randn(2, 3, 5, 6, requires_grad=True)
    assert "fewer than 1,048,576" in kernels.loses(None, x)
    assert "fewer than 1,048,576" in kernels.loses(None, (x, x))
    assert "no gradient" in kernels.loses(None, x.detach())
    monkeypatch.setattr(kernels, "_FEWEST", 0)
    assert kernels.loses(None, x) is kernels.loses(None, (x, x)) is None


def test_the_join_has_the_order_of_the_projection_and_spares_its_gradient_a_copy():
    projected = torch.randn(2, 5, 3 * 6, device=DEVICE, requires_grad=True)
    x = projected.view(2, 5, 3, 6).transpose(1, 2)
    passed, turned = kernels.split(x, [4, 2], -1, torch.split)
    shared = torch.randn(2, 1, 5, 2, device=DEVICE).expand(2, 3, 5, 2)
    for parts in ((passed, turned * 2), (passed, shared), (shared, passed)):
        assert kernels.joined(parts, -1, torch.cat).transpose(1, 2).is_contiguous()
    joined = kernels.joined((passed, turned), -1, torch.cat)
    for incoming in (
        torch.randn(2, 3, 5, 6, device=DEVICE),
        torch.randn(2, 5, 3, 6, device=DEVICE).transpose(1, 2),
        torch.ones((), device=DEVICE).expand(2, 3, 5, 6),
    ):
        (gradient,) = torch.autograd.grad(joined, x, incoming, retain_graph=True)
        assert torch.equal(gradient, incoming) and gradient.transpose(1, 2).is_contiguous()

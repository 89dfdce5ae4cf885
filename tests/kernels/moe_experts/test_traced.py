"""Experts under ``torch.compile``: one graph, upstream's numbers, and what the user chose."""

import pytest
import torch
from transformers import Qwen3MoeConfig

from tests.kernels.dispatched import compiled, targets
from tests.kernels.matching import DEVICE, close
from veomni_hook.kernels.moe_experts import provenance
from veomni_hook.kernels.selection.process_choice import set_choice

OP = "veomni_hook.moe_experts"
# Grouped products of a GPU are in bfloat16.
GROUPED = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}

pytestmark = pytest.mark.usefixtures("anywhere")


@pytest.fixture
def blocks(modules):
    """Upstream's block of router and experts, and the patched one."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    made = [each.Qwen3MoeSparseMoeBlock(config) for each in modules("qwen3_moe")]
    for parameter in made[0].parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made[1].load_state_dict(made[0].state_dict())
    return [each.to(DEVICE) for each in made]


def stepped(block, run, tokens):
    torch.manual_seed(tokens)
    dtype = next(block.parameters()).dtype
    x = torch.randn(1, tokens, 32, device=DEVICE, dtype=dtype, requires_grad=True)
    block.zero_grad()
    result = run(x)
    result.square().sum().backward()
    return [result.detach(), x.grad, *(each.grad for each in block.parameters())]


@pytest.mark.parametrize("backend", ["torch", "triton"])
# Inductor needs a C++ compiler, and half a minute.
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_with_upstreams_results_and_gradients(blocks, backend, compiler):
    if backend == "triton":
        pytest.importorskip("triton")
    dtype = GROUPED if backend == "torch" else torch.float32
    upstream, block = (each.to(dtype) for each in blocks)
    set_choice(f"eager,moe_experts={backend}")
    run, counter = compiled(block, compiler)
    for _ in range(2):
        close(stepped(block, run, 12), stepped(upstream, upstream, 12), TOLERANCE[dtype])
    assert counter.frame_count == 1
    assert any(f"{OP}_{backend}" in target for target in targets(counter))


def test_lengths_that_change_are_compiled_twice_at_most(blocks):
    upstream, block = (each.to(GROUPED) for each in blocks)
    set_choice("eager,moe_experts=torch")
    run, counter = compiled(block)
    for tokens in (6, 9, 12, 17, 31):
        close(stepped(block, run, tokens), stepped(upstream, upstream, tokens), TOLERANCE[GROUPED])
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_auto_takes_the_fused_ones_unless_the_user_chose(blocks, monkeypatch):
    pytest.importorskip("triton")
    block = blocks[1].bfloat16()  # in float32 it does not win; its numbers do not matter here

    def taken():
        torch._dynamo.reset()
        run, counter = compiled(
            block, fullgraph=False
        )  # which upstream's grouped products are not everywhere
        stepped(block, run, 6)
        return any(OP in target for target in targets(counter))

    # transformers was imported before the package here, which therefore has seen no choice.
    block.experts.config._experts_implementation = "grouped_mm"
    assert not taken()
    monkeypatch.setattr(provenance, "is_watched", lambda *_: True)
    assert taken()
    provenance.note_assignment(block.experts.config, "grouped_mm")
    assert not taken()

"""Routers under ``torch.compile``: one graph, upstream's numbers, an operator where Triton computes."""

import pytest
import torch

from tests.kernels.dispatched import compiled, targets
from tests.kernels.matching import DEVICE, close
from tests.kernels.moe_router.test_models import FAMILIES
from tests.kernels.patched_qwen3 import config_of, twins
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry

pytest.importorskip("triton")

BLOCKS = {"qwen3_moe": "Qwen3MoeSparseMoeBlock", "deepseek_v3": "DeepseekV3MoE"}


def blocks(family, modules):
    """Upstream's block of router and experts, and the patched one."""
    config, _, sizes, _ = FAMILIES[family]
    found = twins(*modules(family), BLOCKS[family], config_of(family, config, **sizes), std=1.0)
    return [each.to(DEVICE) for each in found]


def stepped(run, block):
    torch.manual_seed(3)
    x = torch.randn(2, 7, 32, device=DEVICE, requires_grad=True)
    block.zero_grad()
    run(x).square().sum().backward()
    return [x.grad, *(each.grad for each in block.parameters() if each.grad is not None)]


# Where nobody chose, Triton's, which Inductor's were measured not to beat.
@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow), "auto"])
@pytest.mark.parametrize("family", BLOCKS)
def test_one_graph_with_upstreams_gradients(family, backend, anywhere, modules):
    upstream, block = blocks(family, modules)
    # Upstream's experts are a loop over what the host reads.
    set_choice(f"eager,moe_router={backend},moe_experts=triton")
    run, counter = compiled(block)
    close(stepped(run, block), stepped(upstream, upstream), 1e-4)
    assert counter.frame_count == 1
    assert any("moe_router" in target for target in targets(counter)) is (backend != "torch")


def test_what_can_be_traced():
    found = {(k.backend, k.variant) for k in registry.kernels("moe_router") if k.traceable}
    assert {backend for backend, _ in found} == {"triton", "torch"} and len(found) == 8

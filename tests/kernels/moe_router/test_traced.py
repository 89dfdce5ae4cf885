"""Routers under ``torch.compile``: one graph, upstream's numbers, an operator where Triton computes."""

import importlib

import pytest
import torch
import torch._dynamo.testing

from tests.kernels.matching import DEVICE, close
from tests.kernels.moe_router.test_models import FAMILIES
from tests.kernels.patched_qwen3 import load
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry

pytest.importorskip("triton")

BLOCKS = {"qwen3_moe": "Qwen3MoeSparseMoeBlock", "deepseek_v3": "DeepseekV3MoE"}


def blocks(family, folder):
    """Upstream's block of router and experts, and the patched one."""
    config, _, sizes, _ = FAMILIES[family]
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    of_family = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    made = getattr(of_family, config)(**sizes)
    found = [getattr(each, BLOCKS[family])(made) for each in (home, load(folder, home.__name__))]
    for parameter in found[0].parameters():
        torch.nn.init.normal_(parameter)
    found[1].load_state_dict(found[0].state_dict())
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
def test_one_graph_with_upstreams_gradients(family, backend, anywhere, tmp_path):
    upstream, block = blocks(family, tmp_path)
    # Upstream's experts are a loop over what the host reads.
    set_choice(f"eager,moe_router={backend},moe_experts=triton")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(block, fullgraph=True, backend=counter)
    close(stepped(run, block), stepped(upstream, upstream), 1e-4)
    assert counter.frame_count == 1
    modules = [each for graph in counter.graphs for each in graph.modules() if hasattr(each, "graph")]
    targets = {str(node.target) for module in modules for node in module.graph.nodes}
    assert any("moe_router" in target for target in targets) is (backend != "torch")


def test_what_can_be_traced():
    found = {(k.backend, k.variant) for k in registry.kernels("moe_router") if k.traceable}
    assert {backend for backend, _ in found} == {"triton", "torch"} and len(found) == 8

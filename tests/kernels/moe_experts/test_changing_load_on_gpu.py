"""A load of experts that changes at every step: no compilation, no memory beyond the largest, no wait of the host."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

triton = pytest.importorskip("triton")

from tests.kernels.dispatched import without_waits  # noqa: E402
from veomni_hook.kernels.problem import beside  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 4096, 512, 256, 32, 4


def routed(seed: int, hot: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and weights, with one expert that gets more than others."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    logits = torch.randn(TOKENS, EXPERTS, device="cuda", generator=generator)
    logits[:, seed % EXPERTS] += hot
    weights, ids = logits.softmax(-1).topk(TOP_K, dim=-1)
    return ids, weights.bfloat16().requires_grad_()


@pytest.fixture
def step():
    """A forward and backward of one set of weights, with other routing at each call."""
    shapes = {"x": (TOKENS, HIDDEN), "up": (EXPERTS, 2 * INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER)}
    leaves = {
        name: (torch.randn(*shape, device="cuda") * 0.1).bfloat16().requires_grad_()
        for name, shape in shapes.items()
    }
    gradient = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    kernel = beside("moe_experts", "gated", "cuda")["ours"]

    def run(ids: torch.Tensor, weights: torch.Tensor) -> None:
        for leaf in (*leaves.values(), weights):
            leaf.grad = None
        out = kernel(leaves["x"], ids, weights, leaves["up"], leaves["down"], functional.silu)
        out.backward(gradient)

    return run


LOADS = [(seed, hot) for seed, hot in enumerate([0.0, 8.0, 2.0, 0.0, 4.0, 1.0, 8.0, 0.0])]


def test_nothing_is_compiled_after_the_first_steps(step, monkeypatch):
    loads = [routed(*load) for load in LOADS]
    for load in loads[:2]:
        step(*load)
    compiled = []
    # The hooks of `knobs.runtime` write a kernel's arguments as JSON, and layouts of Gluon have none.
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **facts: compiled.append(facts["metadata"]["name"])
    )
    for load in loads:
        step(*load)
    assert compiled == []
    # It would have seen it: another dtype of weights is another kernel.
    ids, weights = loads[0]
    step(ids, weights.detach().float().requires_grad_())
    assert compiled


def test_memory_does_not_grow_beyond_the_largest_load(step):
    loads = [routed(*load) for load in LOADS]
    for load in loads:
        step(*load)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for load in loads * 2:
        step(*load)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert after["segment.all.allocated"] == before["segment.all.allocated"]
    assert after["num_alloc_retries"] == before["num_alloc_retries"]
    assert after["allocated_bytes.all.peak"] == before["allocated_bytes.all.peak"]


def test_the_host_waits_for_nothing(step):
    loads = [routed(*load) for load in LOADS]
    for load in loads[:2]:
        step(*load)
    torch.cuda.synchronize()
    with without_waits():
        for load in loads:
            step(*load)
        with pytest.raises(RuntimeError, match="synchroniz"):  # that mode sees what waits
            loads[0][0].max().item()

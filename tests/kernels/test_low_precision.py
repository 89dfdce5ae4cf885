"""Models whose Linear layers multiply in fewer bits: nothing of that is lost where kernels run."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.kernels import patched_qwen3
from tests.kernels.dispatched import compiled
from tests.kernels.low_precision import KINDS, RoundedLinear, convert, wrap
from tests.kernels.matching import DEVICE, close
from tests.kernels.patched_qwen3 import batch, load
from tests.kernels.test_compiled_model import KERNELS, operators
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.tools.report.explanation import explain

pytest.importorskip("triton")

from veomni_hook.kernels.gated_mlp import triton as gated

pytestmark = pytest.mark.usefixtures("anywhere")

TRITON = ",".join((*KERNELS.values(), "linear_cross_entropy=torch"))
# A rounding that falls to the other side, as it may on another processor, moves one of a tensor's 512 numbers by a
# seventh of the largest: 2 % of the tensor's norm. What rounds nothing is off by 20 % and more.
OF_LOSS, OF_GRADIENT = 1e-3, 6e-2
#: What `explain` says of the head.
REASONS = {
    "module": "the head is a RoundedLinear, whose forward is not that of nn.Linear",
    "weight": "the weight of the head is a RoundedWeight, not a plain tensor",
    "torchao": "the head is a Float8Linear, whose forward is not that of nn.Linear",
}
TRACED = {
    name: "left to Inductor: torch refused the call: "
    f"under torch.compile the head must be an nn.Linear, not a {kind}"
    for name, kind in (("module", "RoundedLinear"), ("torchao", "Float8Linear"))
}


def not_the_head(name):
    return name != "lm_head"


def pair(patched, **changes):
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    return [each.to(DEVICE) for each in patched_qwen3.pair(patched, **{**sizes, **changes})]


def data(rows=2, length=8):
    return {name: each.to(DEVICE) for name, each in batch(rows, length).items()}


def trained(model, inputs, run=None):
    """The loss of a step and its gradients."""
    model.zero_grad()
    loss = (model if run is None else run)(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def assert_equal(found, expected):
    close(found[0], expected[0], OF_LOSS)
    for gradient, truth in zip(found[1], expected[1], strict=True):
        assert (gradient - truth).norm() <= OF_GRADIENT * truth.norm()


def rows_of(model, op):
    return [row for row in explain(model).rows if row.op == op]


def distance(found, truth):
    """How far gradients are from the true ones, all taken as one vector."""
    found, truth = (torch.cat([each.flatten().double() for each in side[1]]) for side in (found, truth))
    return (found - truth).norm() / truth.norm()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_all_kernels_run_around_such_layers(patched, kind):
    set_choice(TRITON)
    models, inputs = pair(patched), data()
    exact = trained(models[0], inputs)
    upstream, model = (convert(each, kind, not_the_head) for each in models)
    expected, found = (trained(each, inputs) for each in (upstream, model))
    assert distance(expected, exact) > 2e-2, "nothing was rounded"
    assert_equal(found, expected)
    ran = {row.op: row.backend for row in explain(model).rows}
    assert ran == {op: "triton" for op in KERNELS} | {"linear_cross_entropy": "torch"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_they_are_as_exact_as_upstream(patched, kind):
    set_choice(TRITON)
    inputs = data()
    plain, model = pair(patched)
    truth = trained(plain, inputs)
    errors = [
        distance(trained(convert(each.bfloat16(), kind, not_the_head), inputs), truth)
        for each in (copy.deepcopy(plain), model)
    ]
    # Both errors are those of few levels, which no order of a sum changes by a tenth.
    assert errors[1] < 1.1 * errors[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_that_kind_computes_its_logits_itself(patched, kind):
    set_choice("eager,linear_cross_entropy=torch")
    models, inputs = pair(patched, num_hidden_layers=0), data()
    exact = trained(models[0], inputs)
    upstream, model = (convert(each, kind) for each in models)
    expected = trained(upstream, inputs)
    assert distance(expected, exact) > 2e-2, "nothing was rounded"
    for _ in range(2):
        assert_equal(trained(model, inputs), expected)
        (row,) = rows_of(model, "linear_cross_entropy")
        assert (row.backend, row.reason) == ("eager", REASONS[kind])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["module", "torchao"])
def test_such_a_head_under_compile(patched, kind):
    set_choice("eager,linear_cross_entropy=torch")
    models, inputs = pair(patched, num_hidden_layers=0), data()
    upstream, model = (convert(each, kind) for each in models)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_equal(trained(model, inputs, run), trained(upstream, inputs))
    (row,) = rows_of(model, "linear_cross_entropy")
    assert (row.backend, row.reason) == ("eager", TRACED[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["module", "torchao"])
def test_one_graph_with_all_kernels(patched, kind):
    set_choice(",".join((*KERNELS.values(), "linear_cross_entropy=torch")))
    models, inputs = pair(patched), data(1, 6)
    upstream, model = (convert(each, kind, not_the_head) for each in models)
    run, counter = compiled(model)
    expected = trained(upstream, inputs)
    for _ in range(2):
        assert_equal(trained(model, inputs, run), expected)
    assert counter.frame_count == 1
    # Inside the fused op there is no rotation of its own.
    assert {*KERNELS} - {"rotary"} <= operators(counter)
    assert [row.reason for row in rows_of(model, "linear_cross_entropy")] == ["compiled in"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["module", "torchao"])
def test_layers_that_are_compiled_one_by_one(patched, kind):
    set_choice(TRITON)
    models, inputs = pair(patched, num_hidden_layers=2), data(1, 6)
    upstream, model = (convert(each, kind, not_the_head) for each in models)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_equal(trained(model, inputs), trained(upstream, inputs))


def test_experts_with_such_weights_are_left_to_upstream(tmp_path_factory):
    patched = load(tmp_path_factory.mktemp("patched"), modeling_qwen3_moe.__name__)
    set_choice("eager,moe_experts=torch,moe_router=torch")
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, num_attention_heads=4
    )
    config._experts_implementation = "eager"
    blocks = [home.Qwen3MoeSparseMoeBlock(config).to(DEVICE) for home in (modeling_qwen3_moe, patched)]
    for parameter in blocks[0].parameters():
        nn.init.normal_(parameter, std=0.3)
    blocks[1].load_state_dict(blocks[0].state_dict())
    x = torch.randn(1, 8, 32, device=DEVICE)
    exact = blocks[0](x)
    for block in blocks:
        for name in ("gate_up_proj", "down_proj"):
            wrap(block.experts, name)
    found, expected = (trained_block(block, x) for block in blocks[::-1])
    assert (expected[0] - exact).abs().max() > OF_LOSS * exact.abs().max(), "nothing was rounded"
    close(found, expected, 1e-5)
    (row,) = rows_of(blocks[1], "moe_experts")
    assert (row.backend, row.reason) == ("eager", "an operand is a RoundedWeight, not a plain tensor")


def trained_block(block, x):
    x = x.clone().requires_grad_()
    y = block(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())]


def test_a_product_that_such_a_layer_keeps_is_freed_with_the_graph():
    down = RoundedLinear(8, 4, bias=False).to(DEVICE)
    gate, up = (torch.randn(3, 8, device=DEVICE, requires_grad=True) for _ in "gu")
    gc.disable()
    try:
        product = gated.product(gate * 1, up * 1, functional.silu)
        kept = weakref.ref(product)
        y = down(product)
        del product
        assert kept() is not None, "the layer's own operator keeps its input"
        y.sum().backward()
        assert kept() is None
    finally:
        gc.enable()
    assert gate.grad is not None and up.grad is not None

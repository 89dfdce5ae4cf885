"""Gluon's kernels of experts' backward on a Hopper GPU, beside Triton's and against results in float64.

Gluon has no interpreter: test_gluon.py compiles them, and decides with them, on any machine.
"""

import math
import threading

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.moe_experts import gluon_cases
from tests.kernels.moe_experts.formulas import CASES as FORMULAS
from tests.kernels.moe_experts.gluon_cases import CASES, Case, Operands
from veomni_hook.kernels.moe_experts import gluon_choice, gluon_products, reference, triton, triton_products
from veomni_hook.kernels.moe_experts.triton_routing import route

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an NVIDIA Hopper GPU",
    ),
    pytest.mark.skipif(gluon_choice._release_refuses() is not None, reason="another Gluon"),
]
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


@pytest.fixture(params=["gluon", "triton"])
def side(request, monkeypatch):
    """Which kernels compute; counts what Gluon's launched."""
    if request.param == "triton":
        monkeypatch.setattr(gluon_choice, "_release_refuses", lambda: "a test")
    launched = []

    def counting(name):
        launch = getattr(gluon_products, name)

        def counted(*operands, **options):
            launched.append(name)
            return launch(*operands, **options)

        monkeypatch.setattr(gluon_products, name, counted)

    counting("weight_gradient")
    counting("gate_up_backward")
    return request.param, launched


def expect(side, names):
    kind, launched = side
    assert launched == (names if kind == "gluon" else [])


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_weights(side, name):
    given = Operands(CASES[name])
    found, truth = gluon_cases.weight_gradients(given)
    expect(side, ["weight_gradient"] * 2)
    assert max(gluon_cases.errors(found, truth)) < TOLERANCE[given.case.dtype]


@pytest.mark.parametrize(("a", "b"), [(144, 272), (272, 144), (16, 16), (2064, 400)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_weights_of_odd_widths(side, a, b, dtype):
    given = Operands(Case(a, b, dtype))
    found, truth = gluon_cases.weight_gradients(given)
    expect(side, ["weight_gradient"] * 2)
    assert max(gluon_cases.errors(found, truth)) < TOLERANCE[dtype]


@pytest.mark.parametrize("spend", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_gate_and_up(side, name, spend):
    given = Operands(CASES[name])
    found, truth = gluon_cases.gate_up_backward(given, spend=spend)
    expect(side, ["gate_up_backward"] if given.case.dtype is torch.bfloat16 else [])
    assert max(gluon_cases.errors(found, truth)) < TOLERANCE[given.case.dtype]


def test_the_same_bits_each_time(side):
    given = Operands(CASES["uneven"])
    first = gluon_cases.weight_gradients(given)[0] + gluon_cases.gate_up_backward(given, spend=False)[0]
    for spend in (True, False, True):
        again = gluon_cases.weight_gradients(given)[0] + gluon_cases.gate_up_backward(given, spend=spend)[0]
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_numbers_that_are_not_finite_stay_with_their_expert(side):
    given = Operands(CASES["uneven"])
    clean, _ = gluon_cases.weight_gradients(given)
    given.rows[given.of_expert(9)] = math.nan
    spoilt, _ = gluon_cases.weight_gradients(given)
    for before, after in zip(clean, spoilt, strict=True):
        others = [expert for expert in range(given.case.experts) if expert != 9]
        assert torch.equal(before[others], after[others]) and after[9].isnan().all()


def test_numbers_that_are_not_finite_stay_with_their_row(side):
    given = Operands(CASES["parts of tiles"])
    clean, _ = gluon_cases.gate_up_backward(given, spend=False)
    own = given.routing.tokens[: given.end] == 5
    given.tokens[5] = math.inf
    given.down[9] = math.nan
    own[given.of_expert(9)] = True
    spoilt, _ = gluon_cases.gate_up_backward(given, spend=True)
    for before, after in zip(clean, spoilt, strict=True):
        assert torch.equal(before[~own], after[~own])
    assert not spoilt[0][own].isfinite().all()


def test_up_that_is_not_finite_stays_in_its_column(side):
    """Columns that a tile has and the matrix has not are read from what follows: from up."""
    given = Operands(Case(512, 320))
    clean, _ = gluon_cases.gate_up_backward(given, spend=False)
    given.products[: given.end, 320] = math.inf
    spoilt, _ = gluon_cases.gate_up_backward(given, spend=True)
    for before, after in zip(clean[:2], spoilt[:2], strict=True):
        kept = [column for column in range(before.shape[1]) if column % 320]
        assert torch.equal(before[:, kept], after[:, kept])


@pytest.mark.parametrize("name", ["gated", "gated_transposed", "gated_float32_product", "ungated"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_whole_experts(side, name, dtype):
    torch.manual_seed(0)
    experts, hidden, inner = 8, 512, 320
    sizes = {12: hidden, 10: inner, 20: 2 * inner}  # by the sizes of the formulas
    formula = FORMULAS[name]
    stacked = [
        (torch.randn(experts, *(sizes[n] for n in shape)) * 0.05).to("cuda", dtype)
        for shape in formula.shapes.values()
    ]
    x = torch.randn(600, hidden).to("cuda", dtype)
    index = torch.randint(experts + 1, (600, 3)).cuda()
    weights = torch.rand(600, 3).to("cuda", dtype)
    dout = torch.randn(600, hidden).to("cuda", dtype)

    def run(function, change):
        leaves = [change(each).requires_grad_() for each in (x, weights, *stacked)]
        out = function(leaves[0], index, leaves[1], *leaves[2:], *formula.rest)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    found = run(triton.kernel(name), lambda each: each.detach().clone())
    truth = run(reference.of(name), lambda each: each.detach().float())
    expect(side, ["gate_up_backward"] * (dtype is torch.bfloat16) + ["weight_gradient"] * 2)
    for number, (ours, exact) in enumerate(zip(found, truth, strict=True)):
        gap = (ours.float() - exact).norm() / exact.norm()
        assert gap < 3 * TOLERANCE[dtype], (number, float(gap))


def test_a_thread_that_has_no_context_yet(side):
    """Kernels are loaded, memory is cached: the first thing that happens in the thread is a descriptor."""
    given = Operands(CASES["uneven"])
    expected = gluon_cases.weight_gradients(given)[0] + gluon_cases.gate_up_backward(given, spend=False)[0]
    operands = (given.tokens, given.down, given.products, given.routing, given.weights, given.case.expert)
    found = []

    def run():
        h = triton_products.gate_up_backward(*operands, spend=False)[1]
        found.append(h[: given.end])
        found.append(
            triton_products.weight_gradient(given.tokens, given.rows, given.routing, gathered=(True, False))
        )

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], expected[3]) and torch.equal(found[1], expected[0])


def test_few_rows_are_left_to_triton(side):
    given = Operands(Case())
    routing = route(given.routing.ids, given.case.experts, 64)
    triton_products.weight_gradient(given.tokens, given.rows, routing, gathered=(True, False))
    expect(side, [])
